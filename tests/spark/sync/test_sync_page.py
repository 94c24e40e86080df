"""The examples in docs/sync.md run, in this order, and print what the page says.

Those for a cluster (``py``) run here as well, with a node and a directory in the place of theirs, as far as they can
without the JARs that they are for.
"""

from __future__ import annotations

import contextlib
import io
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.pipelines.graph_element_registry import GraphElementRegistry, graph_element_registration_context

import upriver.spark
from tests.spark.spark_world import PATIENCE_S
from upriver.lake.options import SyncOptions

pytestmark = pytest.mark.spark
PAGE = Path(__file__).parents[3] / "docs" / "sync.md"
CLUSTER = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = re.compile(r"^```(python notebook|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_does_what_it_shows(spark, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(upriver.spark, "session", lambda *_: spark)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = ""
    blocks = BLOCKS.findall(PAGE.read_text())
    assert [language for language, _ in blocks][:6] == ["python notebook", "text"] * 3
    for language, text in blocks:
        if language == "text":
            assert printed == text
            continue
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "docs/sync.md", "exec"), names)
        printed = out.getvalue()


def cluster_block(about: str, connection: str, lake: str) -> str:
    """The one example for a cluster that names this, with our node and directory."""
    found = [text for text in CLUSTER.findall(PAGE.read_text()) if about in text]
    assert len(found) == 1
    text = found[0].replace("couchbase://db", connection).replace("s3://lake/travel", lake)
    return text.replace('"travel"', '"default"').replace('"..."', repr(f"{lake}/checkpoint"))


def test_the_job_for_a_cluster_syncs(spark, lake, monkeypatch) -> None:
    lake.world.put(5)
    run = upriver.spark.sync
    monkeypatch.setattr(upriver.spark, "sync", lambda spark, **options: run(spark, **options, once=True))
    text = cluster_block("upriver.spark.sync(", lake.world.node.connection_string, lake.lake)
    exec(compile(text, "docs/sync.md", "exec"), {})
    lake.assert_equal()


def test_the_job_with_your_own_tables_runs_up_to_the_missing_connector(spark, lake, capsys) -> None:
    lake.world.put(5)
    names: dict[str, Any] = {"spark": spark}
    text = cluster_block("merge_batches(", lake.world.node.connection_string, lake.lake)
    exec(compile(text.replace("changes.writeStream", "query = changes.writeStream"), "docs/sync.md", "exec"), names)
    assert "MERGE INTO lake.travel" in capsys.readouterr().out
    with pytest.raises(StreamingQueryException, match=r"DATA_SOURCE_NOT_FOUND.*iceberg"):
        names["query"].awaitTermination(PATIENCE_S)


class Registry(GraphElementRegistry):
    """What a pipeline was told."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.flows: list[Any] = []

    def register_output(self, output: Any) -> None:
        self.outputs.append(output)

    def register_flow(self, flow: Any) -> None:
        self.flows.append(flow)

    register_auto_cdc_flow = register_flow

    def register_sql(self, sql_text: str, file_path: Path) -> None:
        raise NotImplementedError


def test_the_declarative_pipeline_is_valid(spark, lake) -> None:
    lake.world.put(5)
    names: dict[str, Any] = {}
    registry = Registry()
    text = cluster_block("create_auto_cdc_flow", lake.world.node.connection_string, lake.lake)
    with graph_element_registration_context(registry):
        exec(compile(text, "docs/sync.md", "exec"), names)
    assert {output.name for output in registry.outputs} == {"changes", "default"}
    view, flow = registry.flows
    assert (flow.source, flow.target) == ("changes", "default")
    source = view.func()
    assert source.isStreaming
    assert {"collection_id", "key"} <= set(source.select("*", flow.sequence_by, flow.apply_as_deletes).columns)


def test_the_options_in_the_toml_file_are_options() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    options = SyncOptions.parse(tomllib.loads(text))
    assert options.shapes["inventory.hotels"]["stars"] == "bigint"
