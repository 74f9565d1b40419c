//! Ranks that wait for each other: schedules that differ by rank, written by hand; and many ranks, checked in time.

use std::time::{Duration, Instant};

use ithaca_ir::layout::At;
use ithaca_ir::mesh::Mesh;
use ithaca_ir::schedule::{self, Party, Schedule};
use ithaca_ir::{DType, Dim, Op, Space, TensorType, boxes};

/// Two gathers of two tensors along two axes, in one order or the other.
fn gathers(first: [&str; 2]) -> Schedule {
    let [a, b] = first;
    let text = format!(
        "ithaca 1 schedule\nmodel \"m\"\nmesh x=2,y=2\ndim s = 8\n\nframe @main(0) bytes 512 events 2 {{\n  \
         buffer $x : f32[s@x] input {{name=\"x\"}}\n  buffer $y : f32[s@y] input {{name=\"y\"}}\n  \
         buffer $all_x : f32[s] at 0\n  buffer $all_y : f32[s] at 256\n  \
         comm: exchange ${a} -> $all_{a} all_gather {{axis={a}, dim=s}} from f32[s@{a}] to f32[s]\n  \
         comm: exchange ${b} -> $all_{b} all_gather {{axis={b}, dim=s}} from f32[s@{b}] to f32[s]\n  \
         return x = $all_x, y = $all_y\n}}\n"
    );
    schedule::parse(&text).unwrap_or_else(|d| panic!("{d:#?}\n{text}"))
}

#[test]
fn a_circle_of_ranks_is_named() {
    let (xy, yx) = (gathers(["x", "y"]), gathers(["y", "x"]));
    for one in [&xy, &yx] {
        schedule::verify(one).unwrap();
    }
    let axis = |name: &str| xy.space.mesh.axis(name).unwrap();
    let at = |name: &str, coordinate: u64| Some(At { axis: axis(name), coordinate });
    // Rank (0, 0) starts with x, which waits for (1, 0), which starts with y and waits for (1, 1), and so on.
    let parties = [Party { at: at("x", 0), schedule: &xy }, Party { at: at("x", 1), schedule: &yx }];
    // Both ranks of a row agree, so rows gather along y, one before the other, and meet along x.
    assert_eq!(schedule::verify_together(&parties), Ok(()));

    let text = schedule::print(&xy);
    let lines: Vec<&str> = text.lines().collect();
    let gather = lines.iter().position(|l| l.contains("axis=x")).unwrap();
    let mut fewer: Vec<&str> = lines.clone();
    fewer.remove(gather);
    let fewer = fewer.join("\n").replace("return x = $all_x, ", "return ");
    let fewer = schedule::parse(&fewer).unwrap();
    let parties = [Party { at: at("x", 0), schedule: &xy }, Party { at: at("x", 1), schedule: &fewer }];
    let found = schedule::verify_together(&parties).unwrap_err();
    assert_eq!(found[0].code, "S17");
    assert!(
        found[0].message.contains("task 0 (`comm: exchange`) on ranks x=0 waits for ranks x=1, which end"),
        "{}",
        found[0].message
    );
}

/// Sends of stages to each other, in an order of its own for each stage.
fn stages(lines: &[(u64, u64)]) -> Schedule {
    let mut text =
        "ithaca 1 schedule\nmodel \"m\"\nmesh pp=3\ndim s = 8\n\nframe @main(0) bytes 4096 events 0 {\n"
            .to_owned();
    let mut tasks = String::new();
    for (n, (from, to)) in [(0, 1), (1, 2), (2, 0)].into_iter().enumerate() {
        text += &format!("  buffer $x{n} : f32[s] on pp={from} input {{name=\"x{n}\"}}\n");
        text += &format!("  buffer $y{n} : f32[s] on pp={to} at {}\n", 256 * n);
    }
    for (from, to) in lines {
        let n = from;
        tasks += &format!(
            "  comm: exchange $x{n} -> $y{n} permute from f32[s] on pp={from} to f32[s] on pp={to}\n"
        );
    }
    text += &format!("{tasks}  return y0 = $y0, y1 = $y1, y2 = $y2\n}}\n");
    schedule::parse(&text).unwrap_or_else(|d| panic!("{d:#?}\n{text}"))
}

#[test]
fn stages_that_wait_in_a_circle_are_named() {
    let orders =
        [[(0, 1), (1, 2), (2, 0)], [(1, 2), (2, 0), (0, 1)], [(2, 0), (0, 1), (1, 2)]].map(|o| stages(&o));
    let axis = orders[0].space.mesh.axis("pp").unwrap();
    let parties = |which: [usize; 3]| -> Vec<Party<'_>> {
        (0..3u64)
            .zip(which)
            .map(|(c, w)| Party { at: Some(At { axis, coordinate: c }), schedule: &orders[w] })
            .collect()
    };
    for which in [[0, 0, 0], [1, 1, 1], [0, 0, 2]] {
        assert_eq!(schedule::verify_together(&parties(which)), Ok(()), "{which:?}");
    }
    // Stage 0 sends to 1 first, 1 to 2, and 2 to 0.
    let found = schedule::verify_together(&parties([0, 1, 2])).unwrap_err();
    assert_eq!(found[0].code, "S17");
    let message = &found[0].message;
    assert!(message.contains("in a circle") && message.matches("task ").count() >= 3, "{message}");
}

/// Collectives of every kind over 16 384 ranks.
#[test]
fn many_ranks_take_no_time() {
    let started = Instant::now();
    let mut space = Space { mesh: Mesh::new([("a", 16), ("b", 16), ("c", 64)]), ..Space::default() };
    let s = space.dims.push(Dim::new("s", 1 << 20));
    let h = space.dims.push(Dim::new("h", 1 << 14));
    let [a, b] = ["a", "b"].map(|name| space.mesh.axis(name).unwrap());
    let x = TensorType::new(DType::BF16, [s, h]);
    let (from, to) = (x.clone().split(s, [a, b]), x.clone().split(s, [b, a]));
    let all: Vec<_> = space.mesh.iter_ranks().collect();
    let bytes = boxes::bytes_sent_by(&space, &Op::Permute, &from, &to, &all);
    assert_eq!(bytes.iter().filter(|&&n| n > 0).count(), 64 * (256 - 16));
    let mut text = format!(
        "ithaca 1 schedule\nmodel \"m\"\nmesh {}\ndim s = {}\ndim h = {}\n\nframe @main(0) bytes {} events 0 {{\n",
        space.mesh,
        1 << 20,
        1 << 14,
        1u64 << 40
    );
    text += "  buffer $x : bf16[s@(a,b) h] input {name=\"x\"}\n  buffer $y : bf16[s@(b,a) h] at 0\n";
    text += "  comm: exchange $x -> $y permute from bf16[s@(a,b) h] to bf16[s@(b,a) h]\n  return y = $y\n}\n";
    let parsed = schedule::parse(&text).unwrap_or_else(|d| panic!("{d:#?}\n{text}"));
    schedule::verify(&parsed).unwrap();
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}
