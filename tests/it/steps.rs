//! Programs of several steps: the whole, its ranks and its schedule keep the same after each.
//!
//! Each `NAME.program.ith` of `tests/files/steps` has a `NAME.ranks.ith` that computes the same on a mesh. Three steps
//! are run, each over what the one before it kept.

use ithaca_ir::{Module, schedule, text, verify};
use ithaca_kernels::store::{Layered, RandomTensors, Tensors};
use ithaca_kernels::{Outputs, Real, Storage, cpu, oracle};

use crate::filetests::files;

/// After how many steps all is compared.
const STEPS: usize = 3;

fn module(path: &std::path::Path, source: &str) -> Module {
    let parsed = text::parse(source).unwrap_or_else(|e| panic!("{}: {e:#?}", path.display()));
    verify::verify(&parsed).unwrap_or_else(|e| panic!("{}: {e:#?}", path.display()));
    assert_eq!(text::parse(&text::print(&parsed)).unwrap(), parsed, "{}", path.display());
    parsed
}

/// The programs with their ranks, by name.
pub(crate) fn cases() -> Vec<(String, Module, Module)> {
    let all = files("steps");
    let of = |name: &str| all.iter().find(|(path, _)| path.ends_with(name)).expect("a program has its ranks");
    let names = all.iter().filter_map(|(path, _)| {
        let name = path.file_name()?.to_str()?.strip_suffix(".program.ith")?;
        Some(name.to_owned())
    });
    names
        .map(|name| {
            let [whole, ranks] = ["program", "ranks"].map(|kind| {
                let (path, source) = of(&format!("{name}.{kind}.ith"));
                module(path, source)
            });
            (name, whole, ranks)
        })
        .collect()
}

type Step = (Outputs<f64>, Outputs<f64>);

/// Runs steps, each over what those before it kept.
fn steps<T: Real>(
    sources: &RandomTensors,
    run: impl Fn(&Layered<'_>) -> (Outputs<T>, Outputs<T>),
) -> Vec<Step> {
    let wide = |outputs: &Outputs<T>| -> Outputs<f64> {
        outputs.iter().map(|(name, t)| (name.clone(), t.map(T::to_f64))).collect()
    };
    let mut kept = Tensors::new();
    (0..STEPS)
        .map(|_| {
            let (outputs, now) = run(&Layered::new(&kept, sources));
            kept = Tensors::from(&now);
            (wide(&outputs), wide(&now))
        })
        .collect()
}

fn close(what: &str, expected: &[Step], found: &[Step], tolerance: f64) {
    for (n, (expected, found)) in expected.iter().zip(found).enumerate() {
        for (expected, found) in [(&expected.0, &found.0), (&expected.1, &found.1)] {
            assert_eq!(expected.keys().collect::<Vec<_>>(), found.keys().collect::<Vec<_>>(), "{what}");
            for (name, x) in expected {
                let y = &found[name];
                assert_eq!(x.shape, y.shape, "{what}: {name}");
                let fits = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * a.abs().max(1.0);
                assert!(x.data.iter().zip(&y.data).all(fits), "{what}, step {n}: {name} is {y:?}, not {x:?}");
            }
        }
    }
}

#[test]
fn the_whole_its_ranks_and_its_schedule_keep_the_same() {
    for (name, whole, ranks) in cases() {
        let sources = RandomTensors::of_module(&whole, 11);
        let interpret = |module: &Module, source: &Layered<'_>| {
            let results = oracle::step::<f64>(module, source, &sources, Storage::Wide).unwrap();
            (results.outputs, results.kept)
        };
        let expected = steps(&sources, |source| interpret(&whole, source));
        let found = steps(&sources, |source| interpret(&ranks, source));
        close(&format!("{name}, ranks"), &expected, &found, 1e-12);
        for module in [&whole, &ranks] {
            let lowered = ithaca_passes::lower::lower(verify::verify(module).unwrap()).unwrap();
            schedule::verify(&lowered).unwrap_or_else(|e| panic!("{name}: {e:#?}"));
            assert_eq!(schedule::parse(&schedule::print(&lowered)).unwrap(), lowered, "{name}");
            let found = steps(&sources, |source| {
                let run = cpu::execute(&lowered, source, &sources, &cpu::Options::default());
                let run = run.unwrap_or_else(|e| panic!("{name}: {e}\n{}", schedule::print(&lowered)));
                (run.outputs, run.kept)
            });
            close(&format!("{name}, schedule"), &expected, &found, 1e-5);
        }
    }
}
