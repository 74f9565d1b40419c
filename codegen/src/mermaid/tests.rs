//! What the diagram of small programs shows.

use ithaca_ir::{Module, text};

use super::emit;

fn module(mesh: &str, body: &str) -> Module {
    let source = format!("ithaca 1 per_rank\nmodel \"m\"\nmesh {mesh}\ndim s = 64\ndim m = 4\n\n{body}");
    text::parse(&source).unwrap()
}

/// The lines of a diagram, without indentation.
fn lines(mesh: &str, body: &str) -> Vec<String> {
    let diagram = emit(&module(mesh, body));
    let blocks = |heads: &[&str]| {
        diagram.lines().filter(|l| heads.iter().any(|h| l.trim_start().starts_with(h))).count()
    };
    assert_eq!(blocks(&["box ", "rect ", "loop "]), blocks(&["end"]), "{diagram}");
    diagram.lines().map(|line| line.trim_start().to_owned()).collect()
}

fn has(lines: &[String], wanted: &[&str]) {
    let mut rest = lines.iter();
    for line in wanted {
        assert!(rest.any(|l| l == line), "`{line}` in its place in\n{}", lines.join("\n"));
    }
}

const GATHER: &str = "func @main() {\n  %x = input {name=\"x\"} : f32[s@u m]\n  \
                      %y = all_gather %x {axis=u, dim=s} : f32[s m]\n  return y = %y\n}\n";

#[test]
fn a_collective_is_an_arrow_for_each_group() {
    let lines = lines("dp=2,u=4", GATHER);
    has(
        &lines,
        &[
            "title: \"m on 8 ranks (dp=2,u=4)\"",
            "box dp=0",
            "participant r0 as rank 0<br/>u=0",
            "box dp=1",
            "participant r7 as rank 7<br/>u=3",
            "Note over r0,r7: LOAD",
            "Note over r0,r7: x: f32[s@u m]",
            "Note over r0,r7: FORWARD",
            "r0<<->>r3: all_gather over u<br/>768 B sent per rank",
            "r4<<->>r7: the same",
        ],
    );
}

#[test]
fn a_large_mesh_is_drawn_by_some_of_its_ranks() {
    let lines = lines("dp=1024,u=32", GATHER);
    let ranks = lines.iter().filter(|l| l.starts_with("participant ")).count();
    assert!((4..=8).contains(&ranks), "{ranks}");
    let notes: Vec<&String> = lines.iter().filter(|l| l.contains("of 32768 ranks are drawn")).collect();
    assert_eq!(notes.len(), 1);
    assert!(lines.iter().any(|l| l.starts_with("r0<<->>r1: all_gather over u")), "{}", lines.join("\n"));
}

#[test]
fn runs_of_equal_collectives_are_one_and_what_repeats_is_a_loop() {
    let mut body = "func @main() {\n  %x0 = input {name=\"x\"} : f32[s@ring m]\n".to_owned();
    for step in 0..3 {
        let (from, to) = (format!("%x{step}"), format!("%x{}", step + 1));
        body += &format!("  %a{step} = permute {from} : f32[s@ring+{} m]\n", step + 1);
        body += &format!("  {to} = permute {from} : f32[s@ring+{} m]\n", step + 1);
        body += &format!("  %n{step} = silu {to} : f32[s@ring+{} m]\n", step + 1);
    }
    body += "  return y = %n2\n}\n";
    has(
        &lines("ring=4", &body),
        &[
            "loop 3 times",
            "r0->>r3: 2 × permute over ring<br/>512 B sent per rank",
            "r1->>r0: the same",
            "r2->>r1: the same",
            "r3->>r2: the same",
            "Note over r0,r3: silu",
            "end",
        ],
    );
}

#[test]
fn a_training_step_goes_through_its_phases() {
    let body = "func @block(%x: f32[s@u m]) {\n  %w = param {name=\"w.{layer}\"} : f32[m]\n  %y = mul %x, %w : f32[s@u m]\n  \
                return %y\n}\n\n\
                func @block.backward(%x: f32[s@u m]) phase backward origin @block {\n  %y = silu %x : f32[s@u m]\n  return %y\n}\n\n\
                func @block.update(%g: f32[] partial(u)) phase update origin @block {\n  %n = all_reduce %g {axis=u} : f32[]\n  \
                %s = state {name=\"optimizer.exp_avg.w.{layer}\"} : f32[m]\n  \
                assign %s {target=state, name=\"optimizer.exp_avg.w.{layer}\"}\n  return %g\n}\n\n\
                func @main() {\n  %x = input {name=\"x\"} : f32[s@u m]\n  \
                %v1 = call %x {callee=@block, layers=0..32} : f32[s@u m]\n  %v2 = silu %v1 : f32[s@u m]\n  \
                %v3 = call %v2 {callee=@block.backward, layers=0..32} : f32[s@u m]\n  \
                %g = fill {value=0.0} : f32[] partial(u)\n  \
                %v4 = call %g {callee=@block.update, layers=0..32} : f32[] partial(u)\n  return y = %v3\n}\n";
    has(
        &lines("u=2", body),
        &[
            "Note over r0,r1: 512 B of weights per rank<br/>512 B of gradients and optimizer states per rank<br/>x: f32[s@u m]",
            "Note over r0,r1: FORWARD",
            "loop 32 layers: @block",
            "Note over r0,r1: mul",
            "end",
            "Note over r0,r1: silu",
            "end",
            "Note over r0,r1: BACKWARD",
            "loop 32 layers: @block.backward",
            "Note over r0,r1: silu",
            "Note over r0,r1: UPDATE",
            "loop 32 layers: @block.update",
            "r0<<->>r1: all_reduce over u<br/>4 B sent per rank",
            "Note over r0,r1: assign",
        ],
    );
}

#[test]
fn weights_are_those_of_the_stage_with_the_most() {
    let body = "func @block(%x: f32[s m]) {\n  %w = param {name=\"w.{layer}\"} : f32[m]\n  \
                %g = state {name=\"grad.w.{layer}\"} : f32[m]\n  %y = mul %x, %w : f32[s m]\n  return %y\n}\n\n\
                func @main() {\n  %x = input {name=\"x\"} : f32[s m] on pp=0\n  \
                %a = param {name=\"a\"} : f32[m] on pp=0\n  \
                %v1 = call %x {callee=@block, layers=0..3, stage=0, along=pp} : f32[s m] on pp=0\n  \
                %v2 = permute %v1 : f32[s m] on pp=1\n  \
                %v3 = call %v2 {callee=@block, layers=3..8, stage=1, along=pp} : f32[s m] on pp=1\n  return y = %v3\n}\n";
    has(
        &lines("pp=2", body),
        &[
            "Note over r0,r1: 80 B of weights per rank<br/>80 B of gradients and optimizer states per rank<br/>x: f32[s m] on pp=0",
        ],
    );
}

#[test]
fn what_would_be_too_long_has_equal_steps_once_and_says_so() {
    let mut body = "func @block(%x: f32[s@u m]) {\n  %y = all_gather %x {axis=u, dim=s} : f32[s m]\n  \
                    %z = slice %y {axis=u, dim=s} : f32[s@u m]\n  return %z\n}\n\n\
                    func @main() {\n  %x0 = input {name=\"x\"} : f32[s@u m]\n"
        .to_owned();
    for step in 0..600 {
        body += &format!("  %x{} = call %x{step} {{callee=@block, layers=0..4}} : f32[s@u m]\n", step + 1);
        body += &format!("  %n{step} = silu %x{} : f32[s@u m]\n", step + 1);
    }
    body += "  return y = %n599\n}\n";
    let lines = lines("u=2", &body);
    let diagram = lines.join("\n");
    assert!(diagram.len() < 50_000, "{} characters", diagram.len());
    assert!(diagram.contains("equal steps of micro-batches are drawn where they first occur"), "{diagram}");
    has(&lines, &["loop 600 times", "loop 4 layers: @block", "end"]);
    assert_eq!(diagram.matches("all_gather over u").count(), 1);
}

#[test]
fn names_mean_nothing_else() {
    let mut module = module("u=2", GATHER);
    module.name = "a \"b\"; # c".into();
    let diagram = emit(&module);
    assert!(diagram.contains("title: \"a \\\"b\\\"; # c on 2 ranks (u=2)\""), "{diagram}");
    let named = text::parse(
        "ithaca 1 per_rank\nmodel \"m\"\ndim s = 4\n\nfunc @main() {\n  %x = input {name=\"a;b %% #<i>\"} : f32[s]\n  \
         return y = %x\n}\n",
    );
    let diagram = emit(&named.unwrap());
    assert!(diagram.contains("Note over r0: a#59;b #37;#37; #35;#60;i#62;: f32[s]"), "{diagram}");
}

#[test]
fn a_module_without_functions_is_an_empty_diagram() {
    let diagram = emit(&text::parse("ithaca 1 per_rank\nmodel \"m\"\n").unwrap());
    assert!(diagram.contains("participant r0 as rank 0\n"), "{diagram}");
}
