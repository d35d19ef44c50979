"""The command as `python -m uncollapse`, which launchers need: `torchrun -m uncollapse train …`."""

from uncollapse.cli.app import app

if __name__ == "__main__":
    app(prog_name="uncollapse")
