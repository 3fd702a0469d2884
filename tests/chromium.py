"""A real browser without a window, for tests of pages."""

from contextlib import contextmanager
from pathlib import Path

import pytest

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the page cannot load anything from other hosts
)


@contextmanager
def started(profile: Path, *flags: str):
    """Start Chromium with a profile of its own, or skip the test if it or selenium is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="a browser is driven by selenium")
    if not (CHROMIUM.is_file() and DRIVER.is_file()):
        pytest.skip(f"there is no {CHROMIUM} or no {DRIVER}")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*QUIET, f"--user-data-dir={profile}", *flags):
        options.add_argument(flag)
    chromium = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    try:
        yield chromium
    finally:
        chromium.quit()
