//! The text tables of nccl-tests: `all_reduce_perf`, `all_gather_perf`, `reduce_scatter_perf`, `alltoall_perf`, `sendrecv_perf`.
//!
//! `size` is the larger of a rank's buffers: its input, and of an all-gather its output. Times are those out of place, as
//! buffers of a schedule are. Ranks and hosts are counted in the list of devices; with groups of `NCCL_TESTS_SPLIT` they are
//! those of group 0. A log may have several tables, one after another.

use std::collections::BTreeSet;

use ithaca_ir::{Diagnostic, Diagnostics, Span};

use super::point::{Group, Point, Work, file_name};
use crate::cluster::Collective;

/// A collective of nccl-tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Test {
    /// The name of the program without `_perf`.
    name: &'static str,
    collective: Option<Collective>,
}

const TESTS: [Test; 5] = [
    Test { name: "all_reduce", collective: Some(Collective::AllReduce) },
    Test { name: "all_gather", collective: Some(Collective::AllGather) },
    Test { name: "reduce_scatter", collective: Some(Collective::ReduceScatter) },
    Test { name: "alltoall", collective: Some(Collective::AllToAll) },
    Test { name: "sendrecv", collective: None },
];

impl Test {
    /// The test whose program `text` names, as in `./build/all_reduce_perf -b 8`.
    fn named_in(text: &str) -> Option<Self> {
        TESTS.into_iter().find(|test| text.contains(&format!("{}_perf", test.name)))
    }

    /// The bus bandwidth of the table over its algorithm bandwidth.
    fn bus_factor(self, ranks: f64) -> f64 {
        match self.collective {
            Some(Collective::AllReduce) => 2.0 * (ranks - 1.0) / ranks,
            Some(Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll) => {
                (ranks - 1.0) / ranks
            }
            None => 1.0,
        }
    }
}

/// Digits of a bandwidth are two after the point, so smaller ones are too coarse to compare.
const COARSE: f64 = 5.0;

/// The points of a log.
///
/// `name` is the file's; `collective` names the test where the log does not.
///
/// # Errors
/// `M23` for each line that is no row of a complete table, for results that are wrong, and for a log without rows or without
/// the name of its test.
pub fn parse(name: &str, collective: Option<&str>, text: &str) -> Result<Vec<Point>, Diagnostics> {
    let given = match collective {
        None => None,
        Some(given) => match TESTS.into_iter().find(|test| test.name == given.trim_end_matches("_perf")) {
            Some(test) => Some(test),
            None => {
                let refusal =
                    Diagnostic::new("M23", format!("`{given}` is no test of nccl-tests that is read"));
                return Err(vec![refusal.names("tests", given, TESTS.iter().map(|test| test.name))]);
            }
        },
    };
    let by_file = || TESTS.into_iter().find(|test| file_name(name).contains(test.name));
    let fallback = given.or_else(|| Test::named_in(text)).or_else(by_file);
    let mut log = Log {
        name,
        given,
        section: Section { test: fallback, ..Section::default() },
        points: Vec::new(),
        mistakes: Vec::new(),
    };
    for (line, at) in lines(text) {
        log.line(line, at);
    }
    if log.points.is_empty() && log.mistakes.is_empty() {
        let message = format!("`{name}` has no row of a table of nccl-tests");
        let help =
            "the rows begin with size, count, type, redop and root; keep the lines with `#` above them";
        log.mistakes.push(Diagnostic::new("M23", message).help(help));
    }
    if log.mistakes.is_empty() { Ok(log.points) } else { Err(log.mistakes) }
}

/// The lines of a text with their places; `mpirun --tag-output` puts its own label before each.
fn lines(text: &str) -> impl Iterator<Item = (&str, usize)> {
    let mut start = 0;
    text.split_inclusive('\n').map(move |whole| {
        let label = whole.find("<stdout>:").map_or(0, |at| at + "<stdout>:".len());
        let found = (whole[label..].trim_end(), start + label);
        start += whole.len();
        found
    })
}

/// A table and the lines above it.
#[derive(Debug, Default)]
struct Section {
    test: Option<Test>,
    /// Ranks in the list of devices, by group.
    ranks: Vec<u64>,
    hosts: BTreeSet<String>,
    /// Threads times GPUs of each, of one process.
    in_process: Option<u64>,
    columns: Option<Columns>,
    /// Whether a mistake concerns all of its rows.
    is_refused: bool,
}

/// The positions of the columns that are read.
#[derive(Clone, Copy, Debug)]
struct Columns {
    n: usize,
    size: usize,
    count: usize,
    dtype: usize,
    time: usize,
    wrong: Option<usize>,
}

/// The rows that a mistake concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Concerns {
    Row,
    Table,
}

/// A log as far as it was read.
struct Log<'a> {
    name: &'a str,
    given: Option<Test>,
    section: Section,
    points: Vec<Point>,
    mistakes: Diagnostics,
}

impl Log<'_> {
    fn line(&mut self, line: &str, at: usize) {
        let at = at + line.len() - line.trim_start().len();
        let line = line.trim_start();
        if let Some(comment) = line.strip_prefix('#') {
            return self.comment(comment);
        }
        // Other lines are messages of NCCL and of launchers.
        let is_row = line.starts_with(|c: char| c.is_ascii_digit());
        if !is_row || self.section.is_refused {
            return;
        }
        match self.row(line, at) {
            Ok(point) => self.points.extend(point),
            Err((mistake, concerns)) => {
                self.section.is_refused = concerns == Concerns::Table;
                self.mistakes.push(mistake);
            }
        }
    }

    fn comment(&mut self, comment: &str) {
        let words: Vec<&str> = comment.split_whitespace().collect();
        if let (None, Some(test)) = (self.given, Test::named_in(comment)) {
            self.section.test = Some(test);
        }
        match words.as_slice() {
            ["nThread", ..] => {
                let number = |key: &str| {
                    let at = words.iter().position(|word| *word == key)?;
                    words.get(at + 1)?.parse::<u64>().ok()
                };
                let in_process = number("nThread").zip(number("nGpus")).map(|(threads, gpus)| threads * gpus);
                self.section = Section { test: self.section.test, in_process, ..Section::default() };
            }
            ["Rank", _, rest @ ..] => {
                let after = |key: &str| {
                    let at = rest.iter().position(|word| *word == key)?;
                    rest.get(at + 1).copied()
                };
                let group = after("Group").and_then(|group| group.parse().ok()).unwrap_or(0usize);
                if self.section.ranks.len() <= group {
                    self.section.ranks.resize(group + 1, 0);
                }
                self.section.ranks[group] += 1;
                if let Some(host) = after("on").filter(|_| group == 0) {
                    self.section.hosts.insert(host.to_owned());
                }
            }
            ["size", "count", ..] => {
                let position = |name: &str| words.iter().position(|word| *word == name);
                let needed = (position("size"), position("count"), position("type"), position("time"));
                self.section.columns = match needed {
                    (Some(size), Some(count), Some(dtype), Some(time)) => {
                        let wrong = position("#wrong").or_else(|| position("error"));
                        Some(Columns { n: words.len(), size, count, dtype, time, wrong })
                    }
                    _ => None,
                };
            }
            _ => {}
        }
    }

    /// The point of a row; none of one without bytes.
    fn row(&self, line: &str, at: usize) -> Result<Option<Point>, (Diagnostic, Concerns)> {
        let cells: Vec<(&str, Span)> = cells(line, at);
        let span = Span::new(at, at + line.len());
        let of_row = |mistake: Diagnostic| (mistake, Concerns::Row);
        let of_table = |mistake: Diagnostic| (mistake, Concerns::Table);
        let Some(columns) = self.section.columns else {
            let mistake = refuse("a row is above the line that names its columns".to_owned(), span);
            return Err(of_table(mistake.help("keep the lines with `#` above the table")));
        };
        if cells.len() != columns.n {
            let message = format!("a row of {} has {} of {} columns", self.title(), cells.len(), columns.n);
            let help = "the log is cut or mixed here: take the line out, or measure again";
            return Err(of_row(refuse(message, span).help(help)));
        }
        let (size, micros) = (
            number(cells[columns.size], "size").map_err(of_row)?,
            number(cells[columns.time], "time").map_err(of_row)?,
        );
        if size == 0.0 {
            return Ok(None);
        }
        if micros == 0.0 {
            let mistake = refuse(format!("{size} bytes take no time"), span);
            return Err(of_row(mistake.help("take the line out, or measure with more iterations")));
        }
        if let Some((cell, at)) = columns.wrong.map(|column| cells[column])
            && (cell.parse::<f64>().is_ok_and(|wrong| wrong > 0.0) || cell.contains("nan"))
        {
            let message = format!("{cell} elements of {} of {size} bytes are wrong", self.title());
            let help = "its time means nothing: find the fault of the machine, and measure again";
            return Err(of_row(refuse(message, at).help(help)));
        }
        let Some(test) = self.section.test else {
            let mistake = refuse(format!("`{}` does not name its test", self.name), span);
            let help = format!("name it before the file, as in `--nccl-tests all_gather={}`", self.name);
            return Err(of_table(mistake.help(help)));
        };
        let (ranks, hosts) = self.ranks(span).map_err(of_table)?;
        self.check_size(test, ranks, (&cells, columns), span).map_err(of_table)?;
        let on = if hosts > 1 { format!(" on {hosts} hosts") } else { String::new() };
        let source = format!("nccl-tests {}_perf, {ranks} ranks{on}, {}", test.name, file_name(self.name));
        let group = Group { collective: test.collective, ranks, hosts, bytes: size as u64 };
        Ok(Some(Point { work: Work::Collective(group), seconds: micros * 1e-6, source, span }))
    }

    fn title(&self) -> &'static str {
        self.section.test.map_or("the table", |test| test.name)
    }

    /// Ranks and hosts of the first group.
    fn ranks(&self, row: Span) -> Result<(u64, u64), Diagnostic> {
        let refuse = |message: String, help: &str| Diagnostic::new("M23", message).at(row).help(help);
        let listed = self.section.ranks.first().copied();
        let Some(ranks) = listed.or(self.section.in_process) else {
            let help = "keep the lines `# nThread …` and `# Rank …` above the table";
            return Err(refuse("the log does not say on how many ranks it ran".to_owned(), help));
        };
        if ranks < 2 {
            let help = "start it with `-g 8`, or with several processes and MPI=1";
            return Err(refuse(format!("a collective of {ranks} rank sends nothing"), help));
        }
        let hosts = self.section.hosts.len().max(1) as u64;
        if !ranks.is_multiple_of(hosts) {
            let help = "measure with as many ranks on each host";
            return Err(refuse(format!("{ranks} ranks are not as many on each of {hosts} hosts"), help));
        }
        Ok((ranks, hosts))
    }

    /// Checks that bandwidths and sizes of a row are those of its test on so many ranks.
    fn check_size(
        &self,
        test: Test,
        ranks: u64,
        (cells, columns): (&[(&str, Span)], Columns),
        row: Span,
    ) -> Result<(), Diagnostic> {
        let number = |column: usize| cells.get(column).and_then(|cell| cell.0.parse::<f64>().ok());
        let refuse = |message: String| {
            let other = if test.name == "all_gather" { "all_reduce" } else { "all_gather" };
            let by_name =
                format!("if it is a log of another test, name it: `--nccl-tests {other}={}`", self.name);
            refuse(message, row).help(by_name).help("if ranks are missing, keep all lines `# Rank …`")
        };
        // The bandwidths follow the time.
        let bandwidths = number(columns.time + 1).zip(number(columns.time + 2));
        let factor = test.bus_factor(ranks as f64);
        if let Some((algorithm, bus)) = bandwidths
            && algorithm >= COARSE
            && (bus / algorithm / factor - 1.0).abs() > 0.02
        {
            return Err(refuse(format!(
                "`busbw` is {:.3} times `algbw`, and {factor:.3} times in {} of {ranks} ranks",
                bus / algorithm,
                test.name
            )));
        }
        let shares = match test.collective {
            Some(Collective::AllReduce) | None => 1.0,
            Some(Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll) => ranks as f64,
        };
        let size = number(columns.size).zip(number(columns.count)).zip(bytes(cells[columns.dtype].0));
        if let Some(((size, count), bytes)) = size
            && size != count * bytes * shares
        {
            return Err(refuse(format!(
                "`size` is {size}, and {count} elements of {bytes} bytes are {} in {} of {ranks} ranks",
                count * bytes * shares,
                test.name
            )));
        }
        Ok(())
    }
}

fn refuse(message: String, span: Span) -> Diagnostic {
    Diagnostic::new("M23", message).at(span)
}

/// A finite number of a cell that is not negative.
fn number((cell, at): (&str, Span), name: &str) -> Result<f64, Diagnostic> {
    let number = cell.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
    number.ok_or_else(|| {
        let mistake = refuse(format!("`{name}` is `{cell}`, which is no positive number"), at);
        mistake.help("measure this size again, or take its line out")
    })
}

/// The words of a line with their places.
fn cells(line: &str, at: usize) -> Vec<(&str, Span)> {
    let place = |word: &str| word.as_ptr() as usize - line.as_ptr() as usize + at;
    line.split_whitespace().map(|word| (word, Span::new(place(word), place(word) + word.len()))).collect()
}

/// Bytes of an element of a type of nccl-tests.
fn bytes(dtype: &str) -> Option<f64> {
    Some(match dtype {
        "int8" | "uint8" | "fp8_e4m3" | "fp8_e5m2" | "f8e4m3" | "f8e5m2" => 1.0,
        "half" | "bfloat16" => 2.0,
        "float" | "int32" | "uint32" => 4.0,
        "double" | "int64" | "uint64" => 8.0,
        _ => return None,
    })
}
