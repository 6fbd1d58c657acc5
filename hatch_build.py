"""Puts into the wheel what is made here: the compiled kernels, the columnar reader for Spark, if there is a JDK, and
the libraries of the console, if there is npm.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILT_LATER = "NATSLOG_BUILT_LATER"
"""Set by `make install`, which makes all of it with what it has just installed."""
_MACHINE = "NATSLOG_MACHINE"
"""Names the machine that the wheel is for, where it is another one than this: x86_64 or aarch64."""


def _builder(folder: str = "connector/jvm") -> ModuleType:
    path = Path(__file__).parent / folder / "build.py"
    spec = importlib.util.spec_from_file_location(f"natslog_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _machine() -> str:
    return os.environ.get(_MACHINE) or platform.machine()


class JarHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def _is_wanted(self) -> bool:
        builder = _builder()
        has_jdk = builder.tool("javac") is not None and builder.tool("jar") is not None
        return has_jdk and not builder.is_current(builder.TARGET) and _BUILT_LATER not in os.environ

    def dependencies(self) -> list[str]:
        needed = ["pyspark>=4.2"] if self._is_wanted() else []
        kernels, machine = _builder("broker/kernels"), _machine()
        is_made = machine not in kernels.PROCESSORS or kernels.is_current(machine, kernels.folder_of(machine))
        if not is_made and _BUILT_LATER not in os.environ:
            needed += kernels.DEPENDENCIES
        return needed

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._add_kernels(build_data, is_editable=version == "editable")
        self._add_jar(build_data)
        self._add_console(build_data)

    def _add_kernels(self, build_data: dict[str, Any], *, is_editable: bool) -> None:
        builder, machine = _builder("broker/kernels"), _machine()
        if machine not in builder.PROCESSORS:
            self.app.display_warning(f"kernels are not compiled for {machine}: the wheel runs them as Python, slowly")
            return
        if _BUILT_LATER in os.environ:
            return
        if machine == platform.machine() and platform.libc_ver()[0] != "glibc":
            self.app.display_warning("a wheel with kernels needs glibc: this one runs them as Python, slowly")
            return
        folder = builder.folder_of(machine)
        if not builder.is_current(machine, folder):
            builder.build(machine, folder)
        if is_editable:
            return  # the package is used where it is
        build_data["force_include"][str(folder / f"{machine}.so")] = f"natslog/wire/libraries/{machine}.so"
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-manylinux_2_17_{machine}"

    def _add_console(self, build_data: dict[str, Any]) -> None:
        builder = _builder("console")
        if not builder.is_current() and _BUILT_LATER not in os.environ and builder.npm() is not None:
            builder.build()
        if builder.is_current():
            build_data["artifacts"].append(f"{builder.TARGET.relative_to(self.root)}/*")
        elif _BUILT_LATER not in os.environ:
            self.app.display_warning("no npm was found: the wheel has no console in the browser")

    def _add_jar(self, build_data: dict[str, Any]) -> None:
        builder = _builder()
        if self._is_wanted():
            builder.build(builder.TARGET)
        if builder.TARGET.is_file():
            build_data["artifacts"].append(str(builder.TARGET.relative_to(self.root)))
        elif _BUILT_LATER not in os.environ:
            self.app.display_warning("no JDK was found: the wheel has no columnar reader for Spark (natslog-spark.jar)")
