"""What every experiment script shares: settings, the workdir, the way it ends.

@dataclass(frozen=True)
class Config:
    seed: int = 0
    target: TargetConfig = TargetConfig()

def main() -> None:
    args = parse(None, Config, {"quick": Config()}, {"--target": "target.source"})
    workdir = open_workdir(args.workdir, args.resume, args.config)
    write_resolved(workdir, args.config, args.preset)
    ...

if __name__ == "__main__":
    run(main)
"""

from experiments._settings import Arguments, parse, replace, to_dict, to_json
from experiments._workdir import (
    device,
    open_workdir,
    run,
    versions,
    write_atomically,
    write_resolved,
)

__all__ = [
    "Arguments",
    "device",
    "open_workdir",
    "parse",
    "replace",
    "run",
    "to_dict",
    "to_json",
    "versions",
    "write_atomically",
    "write_resolved",
]
