//! The one command for the day on which a GPU is there: conformance on the real NCCL, one rank per GPU and several on one, and then the
//! table of what oxccl adds to the bare calls, printed and written to `gpu-figures.md`.
//!
//! `cargo run -p backend-nccl --example gpu_figures`; with `-- --standin` everything up to the device runs on the stand-in of
//! `fixtures/nccl-standin` instead, so that this command cannot be broken on arrival. Its figures mean nothing.

#![allow(
    clippy::expect_used,
    reason = "a measuring program ends at the first surprise"
)]

use std::path::Path;
use std::process::{Command, ExitCode};

/// (name, value) pairs for a child.
type Environment = Vec<(&'static str, String)>;

fn main() -> ExitCode {
    let standin = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--standin") => true,
        Some(other) => {
            eprintln!("unknown argument {other}; the only one is --standin");
            return ExitCode::from(2);
        }
    };
    if !standin && !Path::new("/dev/nvidiactl").exists() {
        println!(
            "nothing measured: no NVIDIA GPU here (/dev/nvidiactl does not exist); --standin tries the commands"
        );
        return ExitCode::SUCCESS;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut environment = Environment::new();
    if standin {
        if !cargo(
            &root,
            &["build", "--quiet", "-p", "nccl-standin"],
            &Environment::new(),
        ) {
            return ExitCode::FAILURE;
        }
        let program = std::env::current_exe().expect("this program has a path");
        // target/<profile>/examples/gpu_figures: the library lies one folder above, in the profile of a plain build.
        let folder = program.ancestors().nth(3).expect("a target folder").join("debug");
        let library = folder.join("libnccl_standin.so").display().to_string();
        environment.push(("OXCCL_NCCL_PATH", library.clone()));
        environment.push(("OXCCL_CUDA_PATH", library));
    }
    println!("== conformance, one rank per GPU");
    let conformance = ["test", "-p", "backend-nccl", "--test", "nccl-real-conformance"];
    let mut good = cargo(&root, &conformance, &environment);
    println!("== conformance, several ranks on one GPU (where this NCCL allows it)");
    let mut shared = environment.clone();
    shared.push(("NCCL_MULTI_RANK_GPU_ENABLE", "1".to_string()));
    good &= cargo(&root, &conformance, &shared);
    println!("== what oxccl adds to the bare calls");
    let mut overhead = vec!["run", "-p", "backend-nccl", "--example", "overhead"];
    if !standin {
        overhead.push("--release");
    }
    overhead.extend(["--", "--markdown", "gpu-figures.md"]);
    if standin {
        overhead.extend(["--pairs", "5", "--max-mib", "1"]);
    }
    good &= cargo(&root, &overhead, &environment);
    if good {
        println!("== done: the table is in gpu-figures.md; put it into docs/performance.md");
        ExitCode::SUCCESS
    } else {
        println!("== something failed; see above");
        ExitCode::FAILURE
    }
}

fn cargo(root: &Path, arguments: &[&str], environment: &Environment) -> bool {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    println!("$ cargo {}", arguments.join(" "));
    Command::new(program)
        .current_dir(root)
        .args(arguments)
        .envs(environment.iter().map(|(name, value)| (*name, value.as_str())))
        .status()
        .is_ok_and(|status| status.success())
}
