"""The reports as a reader sees them, in headless Chromium."""

import re
import shutil

import pytest
from helpers import EVIL, evil_table
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service

from lastlayer.report import make_report
from lastlayer.report.study import report
from lastlayer.studies import figures, networks, paper
from lastlayer.tables import TableRegressor

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    study = paper.run([0], max_epochs=300, bnn_epochs=100)
    figures.draw_all(study, networks.fit_three_samples(max_epochs=300), folder)
    (folder / "report.html").write_text(report([study], folder))
    return folder / "report.html"


@pytest.fixture
def browser(tmp_path):
    """Headless and quiet: no look-ups of its own, a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    flags = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    flags += " disable-component-update disable-sync disable-dev-shm-usage window-size=1200,1600"
    for flag in (*flags.split(), f"user-data-dir={tmp_path}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def returned(browser, script: str):
    return browser.execute_script(f"return {script}")


def reading(browser) -> str:
    return returned(browser, "document.getElementById('reading').textContent")


def waited(browser) -> None:
    browser.execute_async_script("setTimeout(arguments[0], 1000)")


def slid(browser, figure: str, share: float) -> None:
    """The slider of a figure, clicked at that share of its rail."""
    rail = browser.find_element("css selector", f"#{figure} .slider-rail-touch-rect")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", rail)
    ActionChains(browser).move_to_element_with_offset(rail, int(rail.size["width"] * share), 0).click().perform()
    waited(browser)


def visible_band(browser) -> list[float]:
    return browser.execute_script(
        "const traces = document.getElementById('figure4')._fullData;"
        "return Array.from(traces.filter(t => t.fill === 'toself' && t.visible === true)[1].y)"
    )


def severe(browser) -> list:
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def opened(browser, page) -> None:
    """Without errors, and without anything from outside."""
    browser.get(page.as_uri())
    names = returned(browser, "performance.getEntriesByType('resource').map(r => r.name)")
    assert not [name for name in names if name.startswith("http")]
    assert not severe(browser)


def test_the_report_opens_without_errors_or_requests_and_the_slider_moves_the_band(page, browser):
    opened(browser, page)
    assert returned(browser, "document.querySelectorAll('.js-plotly-plot').length") == 1
    widths = returned(browser, "Array.from(document.images, image => image.naturalWidth)")
    assert len(widths) == 4
    assert min(widths) > 100
    before, band = reading(browser), visible_band(browser)
    assert "LPD test" in before
    slid(browser, "figure4", 0.4)
    assert reading(browser) != before
    moved = visible_band(browser)
    assert len(moved) == len(band)
    assert max(abs(a - b) for a, b in zip(moved, band, strict=True)) > 0.1
    assert not severe(browser)


@pytest.fixture(scope="module")
def model_page(tmp_path_factory):
    words = {"hidden": (5,), "max_epochs": 20, "preset": "fast", "random_state": 0}
    fitted = TableRegressor(**words).fit(evil_table(60, 0), target=[f"y{EVIL}", "z"])
    made = make_report(fitted, evil_table(80, 1), model_name=f"m{EVIL}", data_name=f"d{EVIL}", group=f"kind{EVIL}")
    path = tmp_path_factory.mktemp("model") / "report.html"
    path.write_text(made.html)
    return path


def test_a_models_report_opens_offline_whatever_its_table_says(model_page, browser):
    opened(browser, model_page)
    assert returned(browser, "document.querySelectorAll('.js-plotly-plot .main-svg').length") >= 5
    assert returned(browser, "document.images.length") == 0  # no cell has become markup
    assert returned(browser, "document.querySelector('h1').textContent") == f"m{EVIL} on d{EVIL}"


@pytest.mark.parametrize("width", [1280, 390])
def test_reports_fit_a_desk_and_a_phone(model_page, page, browser, width):
    """The page itself never scrolls sideways: tables do, in their own box, and figures are as wide as their column."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    for path in (model_page, page):
        browser.get(path.as_uri())
        waited(browser)
        assert returned(browser, "document.documentElement.scrollWidth") <= width
        boxes = browser.execute_script(
            "return [...document.querySelectorAll('.js-plotly-plot')].map(f => {"
            " const own = f.getBoundingClientRect(), drawn = f.querySelector('.main-svg').getBoundingClientRect(),"
            " column = f.parentElement.parentElement.getBoundingClientRect();"
            " return [own.left, own.right, drawn.width, own.width, column.right] })"
        )
        assert boxes
        for left, right, drawn, own, column in boxes:
            assert 0 <= left < right <= width
            assert abs(drawn - own) < 1
            assert right <= column + 1
        assert not severe(browser)
    browser.get(model_page.as_uri())
    waited(browser)
    first, second = (
        returned(browser, f"document.getElementById('parity-{i}').getBoundingClientRect().top") for i in "01"
    )
    assert (first == second) == (width > 600)  # side by side on wide screens only
    whole, shown = (returned(browser, f"document.getElementById('wrong').{part}Width") for part in ("scroll", "client"))
    assert whole > shown or width > 600


def test_card_and_slider_name_the_same_alpha(model_page, browser):
    browser.get(model_page.as_uri())
    card = returned(browser, "document.getElementById('card').textContent")
    in_card = float(re.search(r"([-\d.]+) in use", card)[1])
    on_slider = float(re.search(r"log alpha ([-\d.]+) \(in use\)", reading(browser))[1])
    assert abs(in_card - on_slider) < 0.006  # digits shown
    order = returned(browser, "[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert order[-1].startswith("Alpha")
    assert returned(browser, "document.getElementById('verdict').textContent").startswith("The 90% intervals")


def test_the_slider_of_a_models_report_moves_band_and_reading(model_page, browser):
    browser.get(model_page.as_uri())
    assert "(in use)" in reading(browser)
    widths = []
    for share in (-0.45, 0.45):
        slid(browser, "alpha", share)
        assert "LPD" in reading(browser)
        band = "document.getElementById('alpha')._fullData.find(t => t.fill === 'toself' && t.visible === true).y"
        widths.append(returned(browser, f"Math.max(...{band}) - Math.min(...{band})"))
    assert widths[1] > 1.05 * widths[0]  # a larger alpha never narrows a band
    assert not severe(browser)


def test_rows_of_a_models_report_can_be_searched(model_page, browser):
    browser.get(model_page.as_uri())
    shown = lambda: browser.execute_script(
        "return [...document.querySelectorAll('#wrong tr')].slice(1).filter(r => !r.hidden).map(r => r.textContent)"
    )
    everything = shown()
    assert len(everything) == 50
    browser.find_element("css selector", "input[data-for=wrong]").send_keys("PLAIN")
    some = shown()
    assert some == [row for row in everything if "plain" in row]
    assert 0 < len(some) < 50
    browser.find_element("css selector", "input[data-for=wrong]").send_keys(" nothing has this")
    assert not shown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_reports_can_be_read_in_light_and_dark(model_page, page, browser, scheme):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    for path in (model_page, page):
        browser.get(path.as_uri())
        colors = browser.execute_script(
            "const of = (e, p) => getComputedStyle(e)[p].match(/[0-9.]+/g).map(Number);"
            "return [of(document.body, 'backgroundColor'), of(document.body, 'color'),"
            " of(document.querySelector('.note'), 'color'),"
            " of(document.querySelector('.xtick text, .x2tick text'), 'fill')]"
        )
        background, *inks = [_luminance(color) for color in colors]
        assert (background > 0.5) == (scheme == "light")
        for ink in inks:
            assert (max(ink, background) + 0.05) / (min(ink, background) + 0.05) >= 3


def _luminance(color: list[float]) -> float:
    """Relative luminance of sRGB, as the accessibility guidelines have it."""
    r, g, b = (c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in color[:3])
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
