//! `cargo xtask … | head`: a reader that goes away ends the task without a word.

use std::process::{Command, Stdio};

#[test]
fn a_task_whose_output_nobody_reads_any_more_ends_quietly() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["tidy", "--lines"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(128 + 13));
}
