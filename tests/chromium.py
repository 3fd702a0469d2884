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


class Page:
    """A page in the browser, whose script has started when `is_ready` returns true."""

    is_ready: str

    def __init__(self, browser, address: str):
        self.browser = browser
        browser.get(address)
        self.wait_for(self.is_ready)

    def wait_for(self, script: str):
        """Return the first result of `script` that is neither false nor null."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.browser, 60, poll_frequency=0.02).until(lambda it: it.execute_script(script))

    def texts(self, selector: str) -> list[str]:
        elements = self.browser.find_elements("css selector", f":is(article, .card) {selector}")
        return [element.get_property("textContent") for element in elements]

    def requests(self) -> list[str]:
        """Return the addresses of everything that the page loaded."""
        return self.browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
