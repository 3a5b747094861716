//! The question to the event logs that the documentation names, to those of a job whose replica dies and heals.

use std::process::Command;

use serde_json::Value;

use crate::http::wait_until;
use crate::job::{Job, lighthouse};

/// The line as it is written: a shell splits it, and finds the files.
fn documented() -> String {
    let page = documents::root().join("docs/observability.md");
    let text = std::fs::read_to_string(page).unwrap();
    let mut lines = text.lines().filter(|line| line.starts_with("jq "));
    lines.next().unwrap().to_owned()
}

#[test]
fn the_question_of_the_documents_finds_the_heal_of_a_replica_that_died() {
    let folder = tempfile::tempdir().unwrap();
    let server = lighthouse("127.0.0.1:0");
    let mut job = Job::new(&server);
    job.events = Some(folder.path().join("events"));
    job.start("a");
    job.start("b");
    let heal = documented();
    let commit = heal.replace("heal", "commit");
    assert_ne!(heal, commit);
    let answers = |question: &str| -> Option<Vec<Value>> {
        let output = Command::new("sh")
            .args(["-c", question])
            .current_dir(&folder)
            .output()
            .unwrap();
        // Before the replicas' first lines there are no files.
        let lines = std::str::from_utf8(&output.stdout).unwrap().lines();
        let answers: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
        (output.status.success() && !answers.is_empty()).then_some(answers)
    };
    wait_until("a step commits", || answers(&commit));
    assert_eq!(answers(&heal), None);
    job.kill("b");
    job.start("b");
    let found = wait_until("replica b heals", || answers(&heal));
    let begins = |value: &Value, name: &str| value.as_str().is_some_and(|s| s.starts_with(name));
    for line in &found {
        assert!(
            begins(&line["replica_id"], "b:") && begins(&line["from"][0], "a:"),
            "{line}"
        );
    }
}
