//! The report: its sums are those of the plan, and its page needs no other file.

use serde_json::Value;

use super::{line, refused, said, workplace};

/// The data of a page, and the plan that it is about.
fn written(args: &str) -> (String, Value, Value) {
    let folder = workplace();
    let at = folder.path();
    let out = said(at, &format!("plan {args} -o plan.json --top 1 --report first.html"));
    assert!(out.ends_with("wrote plan.json\nwrote first.html\n"), "{out}");
    assert_eq!(said(at, "report plan.json -o report.html"), "wrote report.html\n");
    let read = |name: &str| std::fs::read_to_string(at.join(name)).unwrap();
    let page = read("report.html");
    assert_eq!(page, read("first.html"), "`plan --report` and `report` write the same");
    let data = data_of(&page);
    (page, data, serde_json::from_str(&read("plan.json")).unwrap())
}

/// The data of a page.
fn data_of(page: &str) -> Value {
    let (_, rest) = page.split_once("type=\"application/json\">").unwrap();
    let (data, _) = rest.split_once("</script>").unwrap();
    serde_json::from_str(data).unwrap()
}

fn sum<'a>(items: impl IntoIterator<Item = &'a Value>) -> f64 {
    items.into_iter().map(|item| item.as_f64().unwrap()).sum()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// `a` is `b` to the digits that a page has.
fn near(a: f64, b: f64, what: &str) {
    assert!((a - b).abs() <= 1e-3 * b.abs().max(1e-9), "{what}: {a} and {b}");
}

fn sums_agree(data: &Value, plan: &Value) {
    // Memory.
    let (memory, planned) = (&data["memory"], &plan["memory"]);
    let lasting = sum(list(&memory["lasting"]).iter().map(|part| &part["bytes"]));
    let arena = memory["arena"].as_f64().unwrap();
    assert_eq!(lasting + arena, planned["total"].as_f64().unwrap());
    assert_eq!((&memory["total"], &memory["arena"]), (&planned["total"], &planned["arena"]));
    let alive = list(&memory["moments"]).iter().map(|moment| sum(&list(moment)[2..]));
    let most = alive.fold(0.0, f64::max);
    assert!(most > 0.5 * arena && most <= arena, "{most} of an arena of {arena} bytes");
    // Messages.
    let flows = list(&data["traffic"]["flows"]);
    assert_eq!(flows.len(), list(&plan["collectives"]).len());
    for (flow, row) in flows.iter().zip(list(&plan["collectives"])) {
        assert_eq!(flow["bytes"], row["bytes_sent_per_rank"]);
        assert_eq!(sum(list(&flow["by_level"])), flow["bytes"].as_f64().unwrap(), "{flow}");
    }
    let traffic = &data["traffic"];
    let sent = |rank: u64| {
        let own = list(&traffic["pairs"]).iter().filter(|pair| pair[0] == rank).map(|pair| &pair[2]);
        sum(own) + list(&traffic["beyond"])[rank as usize].as_f64().unwrap()
    };
    let busiest = (0..traffic["ranks"].as_u64().unwrap()).map(sent).fold(0.0, f64::max);
    let planned = sum(list(&plan["collectives"]).iter().map(|row| &row["bytes_sent_per_rank"]));
    assert!(busiest > 0.5 * planned && busiest <= planned, "{busiest} of {planned} bytes");
    // The timeline: what its lanes have is what its ranks are at work, listed or folded.
    let steps = &data["timeline"];
    for (i, rank) in list(&steps["ranks"]).iter().enumerate() {
        let lanes: Vec<&Value> = list(&steps["lanes"]).iter().filter(|lane| lane["rank"] == i).collect();
        if lanes.is_empty() {
            continue;
        }
        let compute = lanes.iter().find(|lane| lane["stream"] == "compute").unwrap();
        let of = |lane: &Value, what: &str, column: usize| {
            1e-6 * sum(list(&lane[what]).iter().map(|run| &run[column]))
        };
        let busy = of(compute, "runs", 1) + of(compute, "folds", 4);
        near(busy, rank["compute"].as_f64().unwrap(), "kernels");
        let exposed: f64 = lanes.iter().map(|lane| of(lane, "exposed", 1) + of(lane, "folds", 5)).sum();
        near(exposed, rank["exposed"].as_f64().unwrap(), "exposed");
    }
    let last = list(&steps["ranks"]).iter().map(|rank| rank["seconds"].as_f64().unwrap()).fold(0.0, f64::max);
    assert_eq!(steps["seconds"].as_f64().unwrap(), last);
    // Alternatives: none is lost, and one is the plan.
    let alternatives = &data["alternatives"];
    let refused: usize = list(&alternatives["refused"]).iter().map(|one| list(&one["layouts"]).len()).sum();
    let rows = list(&alternatives["rows"]);
    let n = rows.len() + list(&alternatives["too_large"]).len() + refused;
    assert_eq!(n, list(&plan["alternatives"]).len());
    assert_eq!(rows.iter().filter(|row| row["is_chosen"] == true).count(), 1);
    assert!(rows.iter().any(|row| row["is_frontier"] == true));
}

#[test]
fn a_report_agrees_with_its_plan_and_needs_no_other_file() {
    let (page, data, plan) = written("examples/llama-3-8b --gpus 8 --seq 8192");
    sums_agree(&data, &plan);
    near(
        data["timeline"]["ranks"][0]["exposed"].as_f64().unwrap(),
        plan["time"]["exposed_seconds"].as_f64().unwrap(),
        "exposed time of a plan whose ranks share no links",
    );
    for outside in ["src=", "<link", "@import", "href=\"h", "fetch(\""] {
        let own = page.split("<script>").next().unwrap();
        assert!(!own.contains(outside), "`{outside}`");
    }
    assert!(page.contains("<svg xmlns") && page.len() < 1_500_000, "{} bytes", page.len());
}

#[test]
fn a_report_of_training_in_stages_lists_some_and_sums_all() {
    let args = "examples/llama-3-8b --mode train --gpus 8 --seq 4096 --batch 16 --strategy pipeline+megatron-tp-sp \
                --mesh pp=4,tp=2 --micro-batches 16 --zero 0 --recompute none";
    let (page, data, plan) = written(args);
    sums_agree(&data, &plan);
    assert!(
        data["timeline"]["left_out"].as_str().unwrap().contains("folded"),
        "{}",
        data["timeline"]["left_out"]
    );
    assert!(page.len() < 1_500_000, "{} bytes", page.len());
}

#[test]
fn a_report_is_written_of_plans_only() {
    let folder = workplace();
    let at = folder.path();
    assert!(refused(at, "report nothing.json -o report.html").contains("[C01]"));
    assert!(refused(at, "report examples/llama-3-8b/config.json -o report.html").contains("[C05]"));
    let ran = line(at, "plan --check plan.json --report report.html");
    assert_eq!(ran.code, 2, "{ran:#?}");
}

#[test]
fn a_report_of_a_deployment_has_its_frontier() {
    let folder = workplace();
    let at = folder.path();
    let serve = "plan examples/llama-3-8b --mode serve --rate 10 --input 1k --output-tokens 64 --gpus 2";
    let out = said(at, &format!("{serve} -o deployments.json --report report.html"));
    assert!(out.ends_with("wrote deployments.json\nwrote report.html\n"), "{out}");
    let read = |name: &str| std::fs::read_to_string(at.join(name)).unwrap();
    let (data, page) = (read("deployments.json"), read("report.html"));
    let data: Value = serde_json::from_str(&data).unwrap();
    assert_eq!(data, data_of(&page));
    assert_eq!(said(at, "report deployments.json -o again.html"), "wrote again.html\n");
    assert_eq!(page, read("again.html"), "`plan --report` and `report` write the same");
    assert!(refused(at, "explain deployments.json").contains("ithaca report deployments.json"));
    std::fs::write(at.join("some.json"), r#"{"demand": {}, "frontier": []}"#).unwrap();
    assert!(refused(at, "report some.json -o again.html").contains("[C05]"));
    let frontier = list(&data["frontier"]);
    assert!(!frontier.is_empty() && frontier.last() == Some(&data["chosen"]));
    for row in frontier {
        assert!(out.contains(row["words"].as_str().unwrap()), "{row}");
    }
}
