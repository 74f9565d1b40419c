//! Tables of kernels: comma-separated values, a line of column names first.
//!
//! | column | meaning |
//! |---|---|
//! | `kind` | `matmul`, `attention` or `memory`; may be left out where all rows are products or all are attention |
//! | `dtype` | element type, as `bf16` |
//! | `microseconds` | of one run |
//! | `m`, `n`, `k` | a product `[m k] x [k n]` |
//! | `batch` | products or sequences; 1 if empty |
//! | `heads`, `kv_heads`, `queries`, `keys`, `width` | an attention; `kv_heads` is `heads` and `keys` is `queries` if empty |
//! | `causal` | `true` or `false`; `true` if empty |
//! | `direction` | `forward` or `backward`; `forward` if empty |
//! | `bytes` | of `memory`: bytes that the kernel reads and writes in all |
//!
//! Cells that do not concern a row are empty; lines that begin with `#` are comments.

use ithaca_ir::{DType, Diagnostic, Diagnostics, Span};

use super::kernel::{AttentionSizes, Direction, Kernel};
use super::point::{Point, Work, file_name};

const COLUMNS: [&str; 15] = [
    "kind",
    "dtype",
    "m",
    "n",
    "k",
    "batch",
    "heads",
    "kv_heads",
    "queries",
    "keys",
    "width",
    "causal",
    "direction",
    "bytes",
    "microseconds",
];

/// The points of a table; `name` is the file's.
///
/// # Errors
/// `M23` for each unknown column and each cell that is missing or no number of its kind.
pub fn parse(name: &str, text: &str) -> Result<Vec<Point>, Diagnostics> {
    let mut columns: Option<Vec<&str>> = None;
    let (mut points, mut mistakes) = (Vec::new(), Vec::new());
    let mut start = 0;
    for whole in text.split_inclusive('\n') {
        let (line, at) = (whole.trim_end(), start);
        start += whole.len();
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let Some(columns) = &columns else {
            let names: Vec<&str> = line.split(',').map(str::trim).collect();
            mistakes.extend(names.iter().filter(|name| !COLUMNS.contains(name)).map(|name| {
                let refusal =
                    Diagnostic::new("M23", format!("unknown column `{name}` in a table of kernels"));
                refusal.at(place(line, name, at)).names("columns", name, COLUMNS)
            }));
            columns = Some(names);
            continue;
        };
        let row = Row { line, at, columns, cells: line.split(',').map(str::trim).collect() };
        match row.work().and_then(|work| Ok((work, row.micros()?))) {
            Ok((work, micros)) => points.push(Point {
                work,
                seconds: micros * 1e-6,
                source: file_name(name).to_owned(),
                span: Span::new(at, at + line.len()),
            }),
            Err(mistake) => mistakes.push(mistake),
        }
    }
    if points.is_empty() && mistakes.is_empty() {
        let refusal = Diagnostic::new("M23", format!("`{name}` has no rows"));
        mistakes.push(
            refusal.help("it begins with the names of its columns, as in `kind,dtype,m,n,k,microseconds`"),
        );
    }
    if mistakes.is_empty() { Ok(points) } else { Err(mistakes) }
}

/// The place of a part of a line.
fn place(line: &str, part: &str, at: usize) -> Span {
    let start = part.as_ptr() as usize - line.as_ptr() as usize + at;
    Span::new(start, start + part.len().max(1))
}

struct Row<'a> {
    line: &'a str,
    at: usize,
    columns: &'a [&'a str],
    cells: Vec<&'a str>,
}

impl<'a> Row<'a> {
    fn refuse(&self, message: String) -> Diagnostic {
        Diagnostic::new("M23", message).at(Span::new(self.at, self.at + self.line.len()))
    }

    /// The cell of a column; `None` where it is empty or there is none.
    fn cell(&self, name: &str) -> Option<&'a str> {
        let column = self.columns.iter().position(|column| *column == name)?;
        self.cells.get(column).copied().filter(|cell| !cell.is_empty())
    }

    fn wrong(&self, name: &str, cell: &str, wanted: &str) -> Diagnostic {
        let refusal = Diagnostic::new("M23", format!("`{name}` is `{cell}`, and not {wanted}"));
        refusal.at(place(self.line, cell, self.at))
    }

    fn missing(&self, name: &str, kind: &str) -> Diagnostic {
        self.refuse(format!("a row of `{kind}` has no `{name}`"))
            .help(format!("add the column `{name}`, or fill its cell"))
    }

    fn number(&self, name: &str) -> Option<Result<u64, Diagnostic>> {
        let cell = self.cell(name)?;
        let number = cell.parse::<u64>().ok().filter(|n| (1..=ithaca_ir::Dim::MAX_SIZE).contains(n));
        Some(number.ok_or_else(|| self.wrong(name, cell, "a whole number of at least 1")))
    }

    fn size(&self, name: &str, kind: &str) -> Result<u64, Diagnostic> {
        self.number(name).unwrap_or_else(|| Err(self.missing(name, kind)))
    }

    fn size_or(&self, name: &str, default: u64) -> Result<u64, Diagnostic> {
        self.number(name).unwrap_or(Ok(default))
    }

    fn micros(&self) -> Result<f64, Diagnostic> {
        let name = "microseconds";
        let cell = self.cell(name).ok_or_else(|| self.missing(name, "every kind"))?;
        let micros = cell.parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0);
        micros.ok_or_else(|| {
            self.wrong(name, cell, "a positive number")
                .help("measure this kernel again, or take its line out")
        })
    }

    fn dtype(&self, kind: &str) -> Result<DType, Diagnostic> {
        let cell = self.cell("dtype").ok_or_else(|| self.missing("dtype", kind))?;
        let float = DType::parse(cell).filter(|dtype| dtype.is_float());
        float.ok_or_else(|| self.wrong("dtype", cell, "bf16, f16, f32 or f64"))
    }

    fn work(&self) -> Result<Work, Diagnostic> {
        if self.cells.len() > self.columns.len() {
            let (cells, columns) = (self.cells.len(), self.columns.len());
            return Err(self.refuse(format!("the row has {cells} cells, and the table {columns} columns")));
        }
        let is_attention = self.columns.contains(&"queries") && !self.columns.contains(&"m");
        match self.cell("kind").unwrap_or(if is_attention { "attention" } else { "matmul" }) {
            kind @ "matmul" => {
                let sizes = [self.size("m", kind)?, self.size("n", kind)?, self.size("k", kind)?];
                let product = Kernel::product(self.dtype(kind)?, self.size_or("batch", 1)?, sizes);
                Ok(Work::Kernel(Box::new(product)))
            }
            kind @ "attention" => self.attention(kind),
            kind @ "memory" => Ok(Work::Stream { name: None, bytes: self.size("bytes", kind)? }),
            other => Err(self.wrong("kind", other, "matmul, attention or memory")),
        }
    }

    fn attention(&self, kind: &str) -> Result<Work, Diagnostic> {
        let (heads, queries) = (self.size("heads", kind)?, self.size("queries", kind)?);
        let kv_heads = self.size_or("kv_heads", heads)?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(self.refuse(format!("{kv_heads} key/value heads do not divide {heads} heads")));
        }
        let is_causal = match self.cell("causal") {
            None | Some("true" | "1") => true,
            Some("false" | "0") => false,
            Some(other) => return Err(self.wrong("causal", other, "true or false")),
        };
        let direction = match self.cell("direction") {
            None | Some("forward") => Direction::Forward,
            Some("backward") => Direction::Backward,
            Some(other) => return Err(self.wrong("direction", other, "forward or backward")),
        };
        let (batch, keys) = (self.size_or("batch", 1)?, self.size_or("keys", queries)?);
        let sizes =
            AttentionSizes { batch, heads, kv_heads, queries, keys, width: self.size("width", kind)? };
        Ok(Work::Kernel(Box::new(Kernel::attention(self.dtype(kind)?, sizes, is_causal, direction))))
    }
}
