#!/bin/sh
# Regenerates the reference pages of the documentation.
set -e
python -m serve_app.config.reference > docs/reference/settings.md
python -m serve_app.cli.entry settings --yaml > docs/reference/settings.yaml
python -m serve_app.ingress.observe.families > docs/reference/metrics.md
python -m serve_app.ingress.routes.reference > docs/reference/api.md
python -m serve_app.traffic.reference > docs/reference/traffic.md
{ echo "<!-- Made from the code by \`typer utils docs\`: make docs. -->"; python -m typer serve_app.cli.main utils docs --name warmpath --title "Command line"; } > docs/reference/cli.md
