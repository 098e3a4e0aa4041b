"""Debian's Chromium, driven by its own driver; screenshots for people to look at.

MLXSERVE_SCREENSHOTS names a folder to keep them in.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.conftest import require

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One page of one browser. `wait` waits for a condition, up to half a minute."""

    def __init__(self, driver: webdriver.Chrome, shots: Path) -> None:
        self.driver = driver
        self._shots = shots

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def wait(self, holds: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, 60, poll_frequency=0.05).until(lambda _: holds())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def resize(self, width: int, height: int) -> None:
        settings = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", settings)

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def shoot(self, name: str) -> Path:
        path = self._shots / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path

    def complaints(self) -> list[str]:
        """What the browser logged as severe: script errors, refused resources."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A fresh Chromium with a profile of its own in `folder`."""
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    require(program is not None and driver is not None, "chromium and chromedriver are not installed")
    options = Options()
    options.binary_location = program or ""
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}", "--window-size=1280,860"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    shots = Path(os.environ.get("MLXSERVE_SCREENSHOTS") or folder / "shots")
    shots.mkdir(parents=True, exist_ok=True)
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(chrome, shots)
    finally:
        chrome.quit()
