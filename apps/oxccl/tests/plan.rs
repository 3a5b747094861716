//! `oxccl plan` as its user meets it: the table, JSON, the picture, files of links, and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const JOB: [&str; 9] = [
    "--parameters",
    "1.3B",
    "--step",
    "0.8s",
    "--ranks",
    "8",
    "--delay",
    "20ms",
    "--hosts",
];

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oxccl"))
        .arg("plan")
        .args(arguments)
        .env_remove("OXCCL_LOG")
        .output()
        .unwrap()
}

fn with_job(rest: &[&str]) -> Output {
    plan(&[&JOB, rest].concat())
}

fn text(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output, says: &str) {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{err}");
    assert!(err.contains(says), "{says}: {err}");
}

#[test]
fn the_table_marks_one_line_and_says_why_and_what_is_assumed() {
    let out = text(&with_job(&["4", "--rate", "10gbit"]));
    assert!(out.starts_with("32 ranks on 4 hosts"), "{out}");
    assert_eq!(out.lines().filter(|l| l.starts_with("->")).count(), 1, "{out}");
    for words in [
        "DDP",
        "H=500",
        "Recommended: DiLoCo",
        "95.0 %",
        "Assumed:",
        "95.6 %",
    ] {
        assert!(out.contains(words), "{words}: {out}");
    }
    assert!(out.lines().count() < 40, "one screen: {out}");
    let all = text(&with_job(&["4", "--rate", "10gbit", "--all"]));
    assert!(all.lines().count() > 60, "{all}");
}

#[test]
fn json_has_every_candidate_the_one_to_take_and_what_was_played() {
    let rest = [
        "4",
        "--rate",
        "10gbit",
        "--death-every",
        "5min",
        "--simulate",
        "50",
        "--json",
    ];
    let value: Value = serde_json::from_str(&text(&with_job(&rest))).unwrap();
    let estimates = value["estimates"].as_array().unwrap();
    assert!(estimates.len() > 50);
    let best = &estimates[usize::try_from(value["recommended"].as_u64().unwrap()).unwrap()];
    assert!(best["sync_every"].as_u64().unwrap() > 1);
    for e in estimates {
        let share = |name: &str| e[name].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&share("efficiency")), "{e}");
        assert!(
            (share("efficiency") - share("computing") * share("goodput")).abs() < 1e-9,
            "{e}"
        );
        assert!(share("step") >= 0.8 && share("per_token") > 0.0 && e["sent"].as_u64().unwrap() > 0);
    }
    assert_eq!(value["played"]["committed"], 50);
    assert!(value["assumptions"].as_array().unwrap().len() >= 6);
}

#[test]
fn a_file_of_links_and_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (links, svg) = (path("links.json"), path("plan.svg"));
    // The one of the documents.
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/plan.md");
    let document = std::fs::read_to_string(document).unwrap();
    let json = document
        .split("```json\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    std::fs::write(&links, json).unwrap();
    let job = ["--parameters", "1B", "--step", "1s"];
    let out = text(&plan(&[&job[..], &["--links", &links, "--svg", &svg]].concat()));
    assert!(out.starts_with("48 ranks on 6 hosts"), "{out}");
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("DDP, f32") && !picture.contains("NaN"));
    std::fs::write(&links, json.replacen("north0", "nowhere", 1)).unwrap();
    refused(&plan(&[&job[..], &["--links", &links]].concat()), "nowhere");
    refused(
        &plan(&[&job[..], &["--links", &path("none.json")]].concat()),
        "none.json",
    );
}

#[test]
fn what_makes_no_sense_is_exit_code_2_and_says_what_to_write() {
    refused(&with_job(&["4", "--rate", "0"]), "positive");
    refused(&with_job(&["4", "--rate", "fast"]), "rate");
    refused(&with_job(&["0", "--rate", "1gbit"]), "--hosts");
    refused(&with_job(&["4", "--rate", "1gbit", "--loss", "2"]), "loss");
    refused(&with_job(&["4", "--rate", "1gbit", "--target", "1"]), "target");
    refused(&with_job(&["4", "--rate", "1gbit", "--svg", "x.png"]), ".svg");
    refused(&with_job(&["4"]), "--rate");
    refused(
        &plan(&[
            "--parameters",
            "much",
            "--step",
            "1s",
            "--hosts",
            "2",
            "--rate",
            "1gbit",
        ]),
        "powers of 1000",
    );
}
