"""`natslog support-bundle`: an archive for an engineer who helps."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from natslog.cli.broker_settings import EXAMINED_SETTINGS, config_of
from natslog.cli.common import JsonFlag, global_of
from natslog.cli.doctor import broker_at, shown_progress
from natslog.cli.option_groups import takes
from natslog.cli.output import out, print_json
from natslog.units import format_size


@takes(settings=EXAMINED_SETTINGS)
def support_bundle(
    context: typer.Context,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default natslog-support-TIME.tar.gz here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    hash_names: Annotated[
        bool,
        typer.Option("--hash-names", help="Replace names and subjects by digests, the same ones in the whole archive."),
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            metavar="FILE",
            help="Log of a broker or a NATS server (of journald: journalctl -t natslog -o cat > FILE); its newest "
            "2 MiB. May be given several times.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Write an archive that helps to find the cause of a problem: the result of natslog doctor, versions, settings,
    state of the cluster and its streams, the last hour, metrics, events, and logs that are named.

    It has no messages (payloads, keys, headers) and no secrets, and works if brokers are down; manifest.json lists what
    it has and what is missing. It has at most 64 MiB before compression. Read it before you send it.
    """
    from natslog.diagnosis.bundle.archive import require_free, write_archive
    from natslog.diagnosis.bundle.making import make_parts, redactor_for
    from natslog.diagnosis.doctor import diagnose, examine

    path = output or Path(f"natslog-support-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.tar.gz")
    require_free(path, force=force)
    config, problem = config_of(settings)
    client = broker_at(global_of(context), config).client()
    with shown_progress() as progress:
        examined = examine(config, problem, client, client.options.token_file, progress)
        redactor = redactor_for(config, client, hashes_names=hash_names)
        parts, missing = make_parts(examined, diagnose(examined), client, log or [], redactor, progress)
        size_bytes = write_archive(path, parts, force=force)
    if as_json:
        files = [one.name for one in parts]
        print_json({"file": str(path), "bytes": size_bytes, "files": files, "missing": missing})
        return
    out.print(f"{path}  {format_size(size_bytes)}, {len(parts)} files (tar tzf {path})")
    if missing:
        out.print(f"missing: {', '.join(missing)} (manifest.json has the reasons)", style="yellow")
    out.print("It has no payloads and no secrets. Read it before you send it.")
