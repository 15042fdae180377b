"""Engines get the settings of their deployment."""

from pathlib import Path

from serve_app.checkpoints.sources.resolve import load_served_model
from serve_app.config.app import AppConfig
from serve_app.engine.core.engine import TorchEngine
from serve_app.replica.engine_factory import make_engine


def test_settings_of_equal_names_have_equal_values(demo_model_path: Path) -> None:
    """Settings with other names, or computed ones, have their right values too."""
    tenants = [{"name": name, "key_sha256": [name * 64], "cache_share": share} for name, share in (("a", 1), ("b", 3))]
    fields = {"max_num_seqs": 3, "num_blocks": 50, "pin_budget": 0.5, "host_cache_bytes": 1 << 20, "num_threads": 2}
    config = AppConfig.model_validate(
        {"model": str(demo_model_path), "engine": "simulated", "tenants": tenants, **fields}
    )
    engine = make_engine(config, load_served_model(config), lambda _: None)
    assert isinstance(engine, TorchEngine)
    settings = engine.settings
    assert (settings.max_num_seqs, settings.num_blocks, settings.num_threads) == (3, 50, 2)
    assert (settings.pin_budget_blocks, settings.tiers.host_cache_bytes) == (25, 1 << 20)
    assert settings.tenant_shares == config.cache_shares != {}
