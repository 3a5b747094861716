//! Runs the example of this name, which `cargo test` builds beside this program.
#![allow(clippy::unwrap_used)]

use std::process::Command;

#[test]
fn two_replicas_of_a_burn_model_end_bitwise_equal() {
    let here = std::env::current_exe().unwrap();
    let example = here.ancestors().nth(2).unwrap().join("examples/two_replicas");
    let output = Command::new(example).output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(
        output.status.success() && out.ends_with("bitwise equal\n"),
        "{out}{err}"
    );
}
