"""Ray clusters that tests start, and end whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.effort import PATIENCE_S
from support.extracting import wait_until

DRIVER = Path(__file__).parent / "ray_driver.py"


class Cluster:
    """The processes that a driver starts, recognised by their temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            **os.environ,
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
        }
        self._mark = f"RAY_TMPDIR={folder}".encode()
        self._stop = folder / "stop"
        self.log = folder / "jobs"
        self._drivers: list[subprocess.Popen[str]] = []

    def start(
        self, *commands: Sequence[str], shared: bool, nodes: Sequence[Mapping[str, str]] = ()
    ) -> subprocess.Popen[str]:
        """Start a driver; the first worker to write a trace stops, see `support/ray_driver.py`."""
        self._stop.touch()
        given = {"mark": str(self._stop), "log": str(self.log), "commands": commands, "shared": shared, "nodes": nodes}
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(given)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._drivers.append(driver)
        return driver

    def wait_for_stopped_actor(self, driver: subprocess.Popen[str]) -> int:
        """The process id of the actor that has written one trace and stopped."""

        def stopped() -> list[Path]:
            assert driver.poll() is None, driver.communicate()
            return list(self._stop.parent.glob(f"{self._stop.name}.*"))

        wait_until(stopped, what="an actor that writes", pause=0.05)
        (mark,) = stopped()
        mark.unlink()
        return int(mark.suffix[1:])

    def finish(self, driver: subprocess.Popen[str]) -> tuple[str, str]:
        out, err = driver.communicate(timeout=PATIENCE_S)
        assert driver.returncode == 0, err
        return out, err

    def processes(self) -> dict[int, str]:
        """Process id and command of every process."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # has ended, or belongs to another user
                continue
        return {pid: command for pid, command in found.items() if command}

    def actors(self) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith("ray::_Actor")]

    def listens_at(self) -> set[str]:
        """The addresses, as the kernel writes them, at which its processes listen."""
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
        addresses = {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}
        files: set[str] = set()
        for pid in self.processes():
            with suppress(OSError):  # it has ended
                files |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
        return {address for file, address in addresses.items() if file in files}

    def end(self) -> None:
        """Kill the remaining processes, and no others: Ray's agents outlive a killed driver by a minute."""
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        for driver in self._drivers:
            driver.communicate()
