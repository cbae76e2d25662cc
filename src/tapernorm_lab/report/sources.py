"""Which rows every table and figure of a run is made from. Imports nothing heavy: each start of Snakemake reads it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Rows of a run, or the samples of a benchmark.

    Attributes:
        option: what names them on the command line.
        place: their folder or file below the results of the run.
        frames: the CSV files of that folder; a file has none.
    """

    option: str
    place: str
    frames: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Its files below the results of the run."""
        return tuple(f"{self.place}/{frame}.csv" for frame in self.frames) or (self.place,)


SOURCES = {
    "training": Source("rows", "rows", ("results", "curves")),
    "gpt2": Source("rows", "gpt2_rows", ("scores", "curves", "removals")),
    "decode": Source("bench", "bench/decode.json"),
    "last_token": Source("bench", "bench/last_token.json"),
}
TABLES = {
    "table1": "training",
    "table2": "decode",
    "table2x": "decode",
    "table2v1": "last_token",
    "table3": "gpt2",
    "table3x": "gpt2",
}
FIGURES = {
    "figure1a": "training",
    "figure1b": "training",
    "figure2": "training",
    "figure_decode": "decode",
    "figure_finetune": "gpt2",
}
SETTINGS = {"table4": "training", "table5": "gpt2"}  # made from the config; the rows are those of what they describe

# Of a stage of the study, or of trials on odd inputs (Table S3), by their names.
STAGE_ROWS = "tables/study_{stage}.csv"
ODDITIES_ROWS = "tables/study_{stage}_oddities.csv"
RIVALS_BENCH = "bench/rivals_{stage}.json"
TRIALS_ROWS = ("tables/study_{trials}.csv", "tables/study_{trials}_trials.csv", "tables/study_{trials}_positions.csv")
