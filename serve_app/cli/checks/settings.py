"""Checks of settings before a start, with the error messages of replicas and ingresses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

from serve_app.cache.tiers.object import file_system_of
from serve_app.checkpoints.adapter_registry import configured_adapters
from serve_app.checkpoints.checkpoint import CheckpointInfo, stored_bytes
from serve_app.checkpoints.limits import max_model_len
from serve_app.checkpoints.sources import BUILT_IN, load_served_model
from serve_app.cli.checks.finding import Finding, Look, RunPlace, problem
from serve_app.cli.checks.machine import GIB, memory_bytes, writable_place
from serve_app.cli.supervisor import path_flags
from serve_app.config.app import AppConfig, is_hub_id
from serve_app.config.cache import CPU_POOL_BYTES
from serve_app.engine.runner.kv_size import kv_bytes_per_block
from serve_app.generation.tool_calls.vllm_reader import PARSERS, check_parser
from serve_app.prompts.registry import Prompts
from serve_app.replica.engine_factory import drafter_fields, maker_of, refused_settings, served_fields
from serve_app.stored.database import StorageLimits, StoreError
from serve_app.stored.url import URL_VARIABLE, open_database, ping
from serve_app.tenants import load_secret

_TRIED = """
import json, sys
from importlib import import_module
from pathlib import Path
module, name, argument, options = json.loads(sys.argv[1])
try:
    getattr(import_module(module), name)(Path(argument) if isinstance(argument, str) else argument, **options)
except (ValueError, OSError) as error:
    print(error)
"""
_TEMPLATE = """
import json, logging, sys
from pathlib import Path
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.tokenization.tokenizer import PromptTokenizer
logging.disable(logging.WARNING)
path, template, parsers = json.loads(sys.argv[1])
tokenizer = PromptTokenizer(Path(path), chat_template=template)
print(*tokenizer.template.notes, sep="\\n")
print(AnswerReaders(tokenizer, parsers["tool_parser"], parsers["reasoning_parser"]).unread)
"""


def names(look: Look) -> Iterator[Finding]:
    """Check that prices and tenants' lists name what is served; with runtime adapters, any name may be one."""
    settings = look.settings
    served = settings.served().values()
    known = [name for one in served for name in (one.model_name, *one.lora_adapters)]
    later = any(one.allow_runtime_lora for one in served)
    served_names = f"no model or adapter has this name; it is {' or '.join(known)}"
    for name in settings.prices:
        if name in settings.aliases:
            yield problem(f"prices.{name}", f"{name} is an alias; give the price of {settings.aliases[name]}")
        elif name not in known and not later:
            yield problem(f"prices.{name}", f"the price of {name} never counts: {served_names}")
    for number, tenant in enumerate(settings.tenants):
        for name in tenant.models or ():
            if name not in (*known, *settings.aliases) and not later:
                yield problem(f"tenants.{number}.models", f"the tenant {tenant.name} is given {name}: {served_names}")


def database(_: Look) -> Iterator[Finding]:
    """Check that the database answers: an ingress refuses everybody until it has read its tenants there."""
    if not (url := os.environ.get(URL_VARIABLE)):
        return
    try:
        open_database(url, Path(), StorageLimits(1, 1))  # does not connect
    except StoreError as error:
        yield problem("database", str(error))
        return
    if reason := unreachable(url):
        found = f"the database of ${URL_VARIABLE} does not answer: {reason.removesuffix('.')}"
        yield problem("database", found, "start it, or correct the variable")
    else:
        yield Finding("database", f"the database of ${URL_VARIABLE} answers")


def unreachable(url: str) -> str:
    """Return why the database at a URL does not answer, "" if it does. The URL's password is never part of it."""
    try:
        ping(url)
    except Exception as error:  # of its client, which also takes unknown options for those of its own functions
        reason = str(error).partition("\n")[0]
        password = url.partition("://")[2].rpartition("@")[0].partition(":")[2]
        hidden = bool(password) and (password in reason or unquote(password) in reason)
        return type(error).__name__ if hidden or not reason else reason
    return ""


def prompts(look: Look) -> Iterator[Finding]:
    """Check that the prompts' files can be read, and are unchanged."""
    directory = look.settings.prompts_dir
    if directory is None or _looks_into(directory, look.place):
        yield from _refusal("prompts_dir", lambda: Prompts.of(look.settings.public_prompts, directory))


def engine(look: Look) -> Iterator[Finding]:
    """Check that the engine is installed."""
    missing = look.settings.engine_traits.missing()
    if missing and look.place != "elsewhere":
        yield problem("engine", missing)


def _looks_into(path: Path, place: RunPlace) -> bool:
    """Return whether to check a file of the settings; relative paths of a Serve config start elsewhere."""
    path = path.expanduser()
    return place == "start" or path.exists() or (place == "here" and path.is_absolute())


def _refusal(setting: str, ask: Callable[[], object]) -> Iterator[Finding]:
    """Yield the message of the error that ``ask`` raises."""
    try:
        ask()
    except (ValueError, OSError) as error:
        yield problem(setting, str(error))


def fit(look: Look) -> Iterator[Finding]:
    """Check that settings fit each other and the engine, and that adapters and the secret are usable."""
    settings, place = look.settings, look.place
    if settings.autoscaling is not None and "replicas" in settings.model_fields_set:
        advice = "leave it out, min_replicas and max_replicas count"
        yield problem("replicas", "replicas has no effect beside autoscaling", advice)
    for sentence in refused_settings(settings, on_cpu=not settings.replica_num_gpus):
        yield problem("engine", sentence)
    arguments = settings.to_json()["engine_args"]
    if arguments and place != "elsewhere" and not settings.engine_traits.missing():
        yield from _tried("engine_args", "serve_app.engine.vllm.engine_args", "parsed_engine_args", arguments)
    if settings.speculative_config and place != "elsewhere" and not settings.engine_traits.missing():
        yield from _tried("speculative_config", "serve_app.engine.vllm.engine_args", "check_drafts", settings.drafting)
    required, tried = settings.required_capabilities, settings.engine_traits.tried
    if required and tried and place != "elsewhere" and not settings.engine_traits.missing():
        yield from _tried("required_capabilities", tried, "start", required)
    for setting in PARSERS:
        yield from _refusal(setting, partial(check_parser, setting, getattr(settings, setting)))
    adapters = {name: path for name, path in settings.lora_adapters.items() if _looks_into(path, place)}
    yield from _refusal("lora_adapters", lambda: configured_adapters(adapters, settings.max_lora_rank))
    secret = settings.secret_file
    if place == "start" or (secret is not None and _looks_into(secret, place)):
        yield from _refusal("secret_file", lambda: load_secret(secret_file=secret))
    if place == "start" and settings.store_responses and (url := os.environ.get(URL_VARIABLE)):
        limits = StorageLimits(1, 1)
        yield from _refusal("store_responses", lambda: open_database(url, Path(), limits))  # does not connect


def _there(settings: AppConfig, place: RunPlace) -> bool:
    """Return whether to look at the checkpoint now."""
    path = Path(settings.model).expanduser()
    by_name = settings.model in BUILT_IN or is_hub_id(settings.model)
    if place == "here" and not path.exists() and not by_name and get_close_matches(settings.model, BUILT_IN):
        return True  # a built-in one's name, with a mistake
    return place == "start" or path.is_dir() or not (by_name or path.is_file() or not _looks_into(path, place))


def model(look: Look) -> Iterator[Finding]:
    """Check that the checkpoint exists and fits, with its budgets. A name to fetch does not count as missing."""
    settings, place = look.settings, look.place
    if not _there(settings, place):
        return
    try:
        info = load_served_model(settings)
    except (ValueError, OSError) as error:
        yield problem("model", str(error))
        return
    fields, on_cpu = served_fields(settings, info.path), not settings.replica_num_gpus
    refused = maker_of(settings).refused_model(fields, settings, on_cpu=on_cpu)
    yield from (problem("model", sentence) for sentence in refused)
    costs = maker_of(settings).costs_of_model(fields, settings)
    yield from (Finding("model", sentence, state="warning") for sentence in costs)
    drafter = settings.drafting.get("model")
    if isinstance(drafter, str) and (place == "start" or Path(drafter).is_dir()):
        yield from _refusal("speculative_config", lambda: drafter_fields(settings, fields))
    yield from _refusal("max_model_len", lambda: max_model_len(settings, info))
    yield from _blocks(settings, fields.get("text_config", fields))
    if settings.engine_traits.built_in and settings.model not in BUILT_IN:
        yield from _tried("model", "serve_app.engine.attention.supported", "served_config", str(info.path))
    if settings.chat_template is not None:
        own = {"chat_template": settings.chat_template}
        yield from _tried("chat_template", "serve_app.tokenization.tokenizer", "PromptTokenizer", str(info.path), **own)
    if place == "start":
        yield from _memory(settings, info)


def template(look: Look) -> Iterator[Finding]:
    """Find what the model's chat template does not take, and what is done about it."""
    settings = look.settings
    if look.place == "elsewhere" or not _there(settings, look.place):
        return
    try:
        path = load_served_model(settings).path
    except (ValueError, OSError) as error:
        yield problem("chat template", str(error), "give --model a checkpoint's directory")
        return
    parsers = {name: getattr(settings, name) for name in PARSERS}
    for note in _printed(_TEMPLATE, [str(path), settings.chat_template, parsers]).splitlines():
        yield Finding("chat template", note)


def _tried(setting: str, module: str, name: str, argument: object, **options: object) -> Iterator[Finding]:
    """Yield the message of the error of a call, of which a string is a path."""
    if sentence := _printed(_TRIED, [module, name, argument, options]):
        yield problem(setting, sentence)


def _printed(program: str, argument: object) -> str:
    """Return what a program prints, in a separate process, because its imports take seconds."""
    command = [sys.executable, *path_flags(), "-c", program, json.dumps(argument)]
    asked = subprocess.run(  # noqa: S603  # our own program
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    return asked.stdout.strip()


def _blocks(settings: AppConfig, fields: dict[str, object]) -> Iterator[Finding]:
    """Check that each budget holds one KV block of minimum size."""
    dtype = "bfloat16" if settings.dtype == "auto" else settings.dtype
    try:
        block_bytes = kv_bytes_per_block(SimpleNamespace(**fields), dtype, settings.block_size, *settings.rank_sizes)
    except (AttributeError, TypeError):
        return  # values that the file leaves to transformers' defaults are checked in the replica
    for name in ("kv_cache_bytes", "host_cache_bytes", "disk_cache_bytes"):
        budget_bytes = getattr(settings, name)
        if budget_bytes and budget_bytes < block_bytes:
            yield problem(name, f"{name}={budget_bytes} cannot hold one KV block of {block_bytes} bytes")


def _memory(settings: AppConfig, info: CheckpointInfo) -> Iterator[Finding]:
    """Check that the replicas fit this machine's memory."""
    if settings.engine_traits.simulated or settings.engine_traits.external or settings.replica_num_gpus:
        return
    weights_bytes = stored_bytes(info.path)
    pool_bytes = 0 if settings.num_blocks else settings.kv_cache_bytes or CPU_POOL_BYTES
    needed_bytes = settings.first_replicas * (weights_bytes + pool_bytes + settings.host_cache_bytes)
    if needed_bytes > memory_bytes():
        yield problem(
            "replicas",
            f"{settings.first_replicas} replicas need {needed_bytes / GIB:.1f} GiB for weights "
            f"({weights_bytes / GIB:.1f} each), kv_cache_bytes ({pool_bytes / GIB:.1f}) and host_cache_bytes "
            f"({settings.host_cache_bytes / GIB:.1f}), and this machine has {memory_bytes() / GIB:.1f} GiB",
        )


def written_files(look: Look) -> Iterator[Finding]:
    """Check that the files of usage and of stored responses can be created or written."""
    for name in ("usage_file", "responses_file"):
        if (given := getattr(look.settings, name)) is not None:
            file = given.expanduser().absolute()
            if not _looks_into(given.parent, look.place):
                continue
            if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
                yield problem(name, f"{name}={file} is no file that this user may write; name another one")


def disk_tier(look: Look) -> Iterator[Finding]:
    """Check the object tier's URL, and that the disk tier's directory can be written and its disk is large enough."""
    settings = look.settings
    if settings.object_cache_url is not None:
        yield from _refusal("object_cache_url", partial(file_system_of, settings.object_cache_url))
    if not settings.disk_cache_bytes or settings.disk_cache_dir is None:
        return
    directory = settings.disk_cache_dir.expanduser().absolute()
    try:
        place = writable_place(directory)
    except OSError as error:
        yield problem("disk_cache_dir", f"disk_cache_dir={directory}: {error}")
        return
    needed_bytes, disk_bytes = settings.first_replicas * settings.disk_cache_bytes, shutil.disk_usage(place).total
    if needed_bytes > disk_bytes:
        yield problem(
            "disk_cache_bytes",
            f"{settings.first_replicas} replicas with disk_cache_bytes={settings.disk_cache_bytes} need "
            f"{needed_bytes / GIB:.1f} GiB, and the disk of {place} has {disk_bytes / GIB:.1f} GiB",
        )
