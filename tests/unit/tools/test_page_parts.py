"""The parts that the pages about a run share: links, embedded data, charts with intervals and tables."""

import json
import math
import re

import pytest

from meshrl.core.errors import OutputError
from meshrl.tools.page.charts import Line, figure, line_chart
from meshrl.tools.page.document import data_block, document, write_page


def links(path):
    return re.findall(r'<a href="([^"]+)">', re.search(r"<nav.*?</nav>", path.read_text())[0])


def test_pages_of_a_folder_link_to_each_other_as_soon_as_they_exist(tmp_path):
    report, view = tmp_path / "report.html", tmp_path / "view.html"
    write_page(report, document("run", ["first"]))
    assert "<b>Report</b></nav>" in report.read_text() and links(report) == []
    write_page(view, document("run", ["second"]))
    assert links(report) == ["view.html"] and links(view) == ["report.html"]
    assert "<b>Report</b>" in report.read_text()
    write_page(tmp_path / "diagnose.html", document("run", ["third"]))
    assert links(view) == ["report.html", "diagnose.html"]
    assert "first" in report.read_text() and report.read_text().endswith("</html>\n")


def test_a_page_of_another_program_in_the_folder_is_left_as_it_is(tmp_path):
    other = tmp_path / "view.html"
    other.write_text("<html><nav class='pages'>mine</nav></html>")
    write_page(tmp_path / "report.html", document("run", []))
    assert other.read_text() == "<html><nav class='pages'>mine</nav></html>"


def test_a_page_that_cannot_be_written_raises_an_output_error(tmp_path):
    with pytest.raises(OutputError, match=r"report\.html"):
        write_page(tmp_path / "missing" / "report.html", document("run", []))


def test_embedded_data_cannot_end_its_element_and_keeps_every_character():
    value = {"text": "</script><script>alert(1)</script>", "odd": "\x1b[2J\u202e\x00 é", "list": [1, 2.5, None]}
    block = data_block("rows", value)
    assert block.count("<") == 2 and block.isascii()
    assert json.loads(re.fullmatch(r"<script[^>]*>(.*)</script>", block)[1]) == value


def test_a_title_is_escaped():
    assert "<title>&lt;b&gt;&amp;</title>" in document("<b>&", [])


def test_an_interval_is_a_band_whose_ends_fit_on_the_axis():
    line = Line("score", [0, 5, 10], [0.2, 0.4, 0.3], low=[0.1, 0.3, 0.2], high=[0.3, 0.9, 0.4])
    drawing = line_chart([line], "score")
    band = re.search(r'<path class="band f0" d="([^"]+)"', drawing)[1]
    heights = [float(pair.split()[1]) for pair in re.split("[MLZ]", band) if pair]
    assert len(heights) == 6 and min(heights) > 10  # 10 = the upper edge, where larger values would be cut
    assert "band" not in line_chart([Line("score", [0, 5], [0.2, 0.4])], "score")


@pytest.mark.parametrize("values", [[1.6, 1.614], [1e6, 1.001e6], [-0.0123, -0.01235], [3e-5, 3.0002e-5], [1.0, 1.0]])
def test_no_two_ticks_of_an_axis_have_the_same_text(values):
    labels = re.findall(r'text-anchor="end">(.*?)</text>', line_chart([Line("a", [1, 2], values)], ""))[:-1]
    assert len(labels) == len(set(labels)) > 2


def test_a_figure_names_its_axes_and_describes_itself_to_a_screen_reader():
    drawn = figure("Memory", "bytes", [Line("rank <0>", [0.5, 1.5], [1e6, 2e6])], across="seconds")
    assert 'aria-label="rank &lt;0&gt; in bytes over seconds"' in drawn and ">seconds</text>" in drawn
    assert "<small>bytes</small>" in drawn
    assert figure("Nothing", "", [Line("a", [1], [math.nan])]) == ""
