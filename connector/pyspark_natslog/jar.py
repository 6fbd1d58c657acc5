"""The columnar reader and the sink in the JVM: a jar in this package, which Spark has to be told of."""

from __future__ import annotations

from pathlib import Path

from natslog.errors import ConfigError

_PATH = Path(__file__).parent / "jars" / "natslog-spark.jar"


def jar_path() -> Path:
    """The jar.

    Raises:
        ConfigError: it was not built, because there was no JDK.
    """
    if not _PATH.is_file():
        raise ConfigError(
            "this installation has no natslog-spark.jar, because no JDK was found when it was built. In a checkout: "
            "install a JDK (Debian: apt-get install openjdk-17-jdk-headless), then run make jar"
        )
    return _PATH
