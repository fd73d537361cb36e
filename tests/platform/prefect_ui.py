"""Prefect's UI as a person uses it: a headless browser, and waiting for what it shows, with a deadline."""

import shutil
import time
from contextlib import contextmanager

import pytest
from selenium import webdriver
from selenium.common.exceptions import ElementClickInterceptedException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

DEADLINE = 180.0
"""Seconds until the UI must show what a test waits for; a machine that also trains is slow to draw."""
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,2000",
)


@contextmanager
def opened_ui(url, folder):
    """The UI at `url` in a browser whose files lie in `folder`; skips the test where no browser is installed."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*OPTIONS, f"--user-data-dir={folder / 'browser'}"):
        options.add_argument(option)
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield PrefectUi(browser, url, folder)
    finally:
        browser.quit()


class PrefectUi:
    """What is on the screen, found by XPath; each wait that is given up leaves a screenshot."""

    def __init__(self, browser, url, folder):
        self._browser = browser
        self._folder = folder
        self.url = url

    def open(self, path):
        self._browser.get(f"{self.url}/{path}")

    def texts(self, xpath):
        """The texts of all elements, from top to bottom."""
        return [element.text for element in self._browser.find_elements(By.XPATH, xpath)]

    def until(self, look, what):
        """What `look` returns as soon as that is true; the page may be redrawn meanwhile."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                if found := look():
                    return found
            except (StaleElementReferenceException, ElementClickInterceptedException):
                pass  # Drawn anew between finding and touching it, or something lies over it for a moment.
            if time.monotonic() > deadline:
                screenshot = self._folder / "given_up.png"
                self._browser.save_screenshot(str(screenshot))
                pytest.fail(f"gave up waiting for {what} at {self._browser.current_url}; see {screenshot}")
            time.sleep(0.5)

    def see(self, xpath, what, tab=None):
        """The first visible element, in this tab of the page if one is named."""
        return self.until(lambda: self._shows(tab) and self._visible(xpath), what)

    def click(self, xpath, what, tab=None):
        """Click on the first visible element, in this tab of the page if one is named."""

        def clicked():
            element = self._shows(tab) and self._visible(xpath)
            if element:
                element.click()
            return element

        self.until(clicked, what)

    def click_button(self, text):
        """Click on the button with this text."""
        self.click(f"//button[normalize-space()='{text}']", f"the button {text}")

    def paste(self, xpath, text, what):
        """Replace the text of a field."""
        field = self.see(xpath, what)
        field.click()
        field.send_keys(Keys.CONTROL, "a")
        self._browser.execute_cdp_cmd("Input.insertText", {"text": text})

    def _visible(self, xpath):
        elements = self._browser.find_elements(By.XPATH, xpath)
        return next((element for element in elements if element.is_displayed()), None)

    def _shows(self, tab):
        """Whether the page shows this tab; a page that has just been opened may go back to its first one."""
        if tab is None:
            return True
        title = self._visible(f"//li[normalize-space()='{tab}']")
        if title is None:
            return False
        if "p-tab__active" not in title.get_attribute("class"):
            title.click()
        return True
