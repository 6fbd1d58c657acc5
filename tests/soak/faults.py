"""What is broken in a soak: brokers (as in `tests.chaos`), the NATS server and the drivers, by kills and pauses."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.chaos.faults import kill_all, kill_one, pause_all, pause_one
from tests.chaos.history import History
from tests.chaos.scene import Fault, Kind, Scene
from tests.cluster_harness import Cluster
from tests.soak.drivers import ChangingDriver, Driver

_HALF_DONE_WITHIN_S = 120.0


class SoakScene(Scene):
    """Also with drivers."""

    def __init__(
        self, cluster: Cluster, history: History, stream: str, chance: random.Random, drivers: Sequence[Driver]
    ) -> None:
        super().__init__(cluster, history, stream, chance)
        self.drivers = drivers


def kill_nats(scene: Scene) -> Fault:
    """SIGKILL, not an orderly end: what it has not written to its sockets is gone."""
    server = scene.cluster.nats
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    return Fault("NATS", False, lambda: server.start() and None, scene.hold(0.0, 4.0))


def pause_nats(scene: Scene) -> Fault:
    pid = scene.cluster.nats.pid
    os.kill(pid, signal.SIGSTOP)
    return Fault("NATS", False, lambda: os.kill(pid, signal.SIGCONT), scene.hold(1.0, 6.0))


def kill_driver(driver: Driver, scene: Scene) -> Fault:
    """At first, and mostly, in the middle of a batch, when some of it is written and Spark has not noted it as done: it
    will be run again. Otherwise at any time: while the driver starts, plans, or is idle.
    """
    aims = not driver.killed_half_done or scene.chance.random() < 0.6
    is_half_done = aims and driver.wait_until_half_done(_HALF_DONE_WITHIN_S)
    driver.kill()
    driver.killed_half_done += is_half_done
    when = "in the middle of a batch" if is_half_done else "at any time"
    return Fault(f"{driver.name}, {when}", True, driver.restart, scene.hold(0.0, 1.0))


def pause_driver(driver: Driver, scene: Scene) -> Fault:
    driver.pause()
    return Fault(driver.name, True, driver.resume, scene.hold(1.0, 8.0))


def redeploy(driver: ChangingDriver, scene: Scene) -> Fault:
    """It is killed, mostly in the middle of a batch, and started in another version."""
    fault = kill_driver(driver, scene)
    driver.save()
    driver.change()
    return fault


def set_back(driver: ChangingDriver, scene: Scene) -> Fault:
    """It is killed, and started from checkpoints of an earlier moment."""
    fault = kill_driver(driver, scene)
    fault.place += ", from saved checkpoints" if driver.set_back() else ", nothing saved yet"
    return fault


def kill_everything(scene: Scene) -> Fault:
    """Brokers, NATS and drivers at once."""
    assert isinstance(scene, SoakScene), "drivers are there"
    drivers, server = scene.drivers, scene.cluster.nats
    for driver in drivers:
        driver.kill()
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    kill_all(scene)

    def heal() -> None:
        server.start()
        scene.start(*scene.cluster.brokers)
        for driver in drivers:
            driver.restart()

    return Fault("all", False, heal, 0.0)


def _named(begin: Callable[[Any, Scene], Fault], driver: Driver) -> Kind:
    """A kind of this driver's own, with a name as other kinds have."""
    made = partial(begin, driver)
    made.__name__ = f"{begin.__name__}_{driver.name}"  # type: ignore[attr-defined]
    return Kind(made)


def kinds(brokers: int, drivers: Sequence[Driver]) -> list[Kind]:
    """All there are; with several brokers also one of them alone."""
    of_drivers = [_named(begin, driver) for driver in drivers for begin in (kill_driver, pause_driver)]
    changing = [driver for driver in drivers if isinstance(driver, ChangingDriver)]
    of_drivers += [_named(begin, driver) for driver in changing for begin in (redeploy, set_back)]
    of_one = [Kind(kill_one), Kind(pause_one)] if brokers > 1 else []
    return [Kind(kill_all), Kind(pause_all), *of_one, Kind(kill_nats), Kind(pause_nats), *of_drivers]
