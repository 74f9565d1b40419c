//! A rank's part of a stored tensor as a function of the rank; tables that kernels read.

use ithaca_device::{Choice, Int, ResidentDim, ResidentTensor, Table};

use super::names;
use super::number::Numbers;
use super::record::int_distance;

/// The body of the function that returns a part: a list of dimensions.
pub(super) fn part(numbers: &Numbers<'_>, resident: &ResidentTensor) -> String {
    let dims: Vec<String> = resident.dims.iter().map(|dim| self::dim(numbers, dim)).collect();
    format!("{{{}}}", dims.join(", "))
}

fn dim(numbers: &Numbers<'_>, dim: &ResidentDim) -> String {
    let ResidentDim { name: _, size: _, stored: _, copies, start, end, runs } = dim;
    let (start, end) = (numbers.int(start), numbers.int(end));
    let has_runs = runs.alternatives.iter().any(|runs| !runs.is_empty());
    match (has_runs, *copies) {
        (false, 1) => format!("{{{start}, {end}}}"),
        (false, copies) => format!("{{{start}, {end}, {copies}}}"),
        (true, copies) => {
            let runs = chosen(numbers, "int64_t", runs, |runs| integers(numbers, runs));
            format!("{{{start}, {end}, {copies}, {runs}}}")
        }
    }
}

/// The statement that adds a table of a rank.
pub(super) fn table(numbers: &Numbers<'_>, table: &Table) -> String {
    match table {
        Table::Integers(list) => {
            format!(
                "tables.add<int64_t>({});",
                chosen(numbers, "int64_t", list, |list| integers(numbers, list))
            )
        }
        Table::Reals(list) => {
            let reals = |list: &Vec<u64>| {
                let list: Vec<String> =
                    list.iter().map(|&bits| names::double(f64::from_bits(bits))).collect();
                format!("{{{}}}", list.join(", "))
            };
            format!("tables.add<double>({});", chosen(numbers, "double", list, reals))
        }
    }
}

/// The alternative of a rank, where each is a list in braces.
fn chosen<T>(
    numbers: &Numbers<'_>,
    ty: &str,
    choice: &Choice<Vec<T>>,
    print: impl Fn(&Vec<T>) -> String,
) -> String {
    if let [only] = choice.alternatives.as_slice() {
        return print(only);
    }
    let number = numbers.chosen(choice);
    let lists: Vec<String> = choice.alternatives.iter().map(print).collect();
    format!("std::vector<std::vector<{ty}>>{{{}}}[{number}]", lists.join(", "))
}

/// A list of integers; evenly spaced triples become a progression.
fn integers(numbers: &Numbers<'_>, list: &[Int]) -> String {
    const SHORT: usize = 12;
    if list.len() > SHORT
        && list.len().is_multiple_of(3)
        && let Some(step) = progression(list)
    {
        let first: Vec<String> = list[..3].iter().map(|int| numbers.int(int)).collect();
        let step: Vec<String> = step.iter().map(i64::to_string).collect();
        return format!("progression({}, {{{}}}, {{{}}})", list.len() / 3, first.join(", "), step.join(", "));
    }
    let list: Vec<String> = list.iter().map(|int| numbers.int(int)).collect();
    format!("{{{}}}", list.join(", "))
}

fn progression(list: &[Int]) -> Option<[i64; 3]> {
    let apart = |a: &[Int], b: &[Int]| -> Option<[i64; 3]> {
        Some([int_distance(&a[0], &b[0])?, int_distance(&a[1], &b[1])?, int_distance(&a[2], &b[2])?])
    };
    let triples: Vec<&[Int]> = list.chunks_exact(3).collect();
    let step = apart(triples[0], triples[1])?;
    triples.windows(2).all(|pair| apart(pair[0], pair[1]) == Some(step)).then_some(step)
}
