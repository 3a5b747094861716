//! `cargo xtask deploy`: the jobs ready to use in `deploy/`, as far as they can be checked without a cluster: those for Kubernetes against the
//! schemas of its API, the scripts for Slurm by the shell's own reader. The tests of the row `slurm` submit the one for a world.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::metadata::Metadata;
use crate::process;
use crate::tidy::files_below;
use crate::venv;

/// With the schemas of Kubernetes 1.37, so that no network is needed.
const REQUIREMENTS: &[&str] = &[
    "attrs==26.1.0",
    "importlib_resources==7.1.0",
    "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1",
    "kubernetes-validate==1.37.0",
    "packaging==26.4",
    "PyYAML==6.0.4",
    "referencing==0.37.0",
    "rpds-py==2026.9.1",
    "typing_extensions==4.16.0",
];

const CHECK_LIMIT: Duration = Duration::from_secs(60);

/// Checks the files. True if all are as they should be.
pub(crate) fn check() -> Result<bool> {
    let metadata = Metadata::read()?;
    let folder = metadata.workspace_root.join("deploy");
    let notice = "deploy: fetching the schemas of Kubernetes (once)";
    let tools = venv::environment("python-kubernetes-validate-1.37.0", notice, REQUIREMENTS, &[])?;
    let mut validate = Command::new(tools.join("bin/kubernetes-validate"));
    validate.args(["--strict", "--quiet"]);
    let mut read = Command::new("bash");
    read.args(["-n", "--"]);
    let checks = [
        (
            "kubernetes-validate --strict",
            validate,
            files_below(&folder, "yaml")?,
        ),
        ("bash -n", read, files_below(&folder, "sbatch")?),
    ];
    let mut is_well = true;
    for (name, command, files) in checks {
        is_well &= run(name, command, &files)?;
    }
    Ok(is_well)
}

fn run(name: &str, mut command: Command, files: &[PathBuf]) -> Result<bool> {
    if files.is_empty() {
        bail!("{name} has no files to check below deploy/");
    }
    let is_well = process::ends_well(name, command.args(files), CHECK_LIMIT)?;
    println!("{name}: {} files", files.len());
    Ok(is_well)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// What `deploy/Containerfile` copies is what `.dockerignore` lets through; cargo needs all members to build one.
    #[test]
    fn the_image_is_built_from_all_members() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read =
            |name: &str| std::fs::read_to_string(root.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let ignored = read(".dockerignore");
        let allowed: Vec<&str> = ignored
            .lines()
            .filter_map(|line| line.strip_prefix('!'))
            .collect();
        let manifest = read("Cargo.toml");
        let (_, rest) = manifest.split_once("members = [").expect("members");
        let (members, _) = rest.split_once(']').expect("their end");
        let folders: Vec<&str> = members
            .split('"')
            .skip(1)
            .step_by(2)
            .filter_map(|m| m.split('/').next())
            .collect();
        assert!(folders.contains(&"crates"), "{folders:?}");
        for needed in folders
            .into_iter()
            .chain(["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"])
        {
            assert!(allowed.contains(&needed), "{needed} is not in .dockerignore");
        }
    }

    #[test]
    fn the_image_is_built_with_this_toolchain_from_packages_that_are_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let read =
            |name: &str| std::fs::read_to_string(root.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let (file, toolchain) = (read("deploy/Containerfile"), read("rust-toolchain.toml"));
        let channel = toolchain.split('"').nth(1).expect("a channel");
        let minor: Vec<&str> = channel.split('.').take(2).collect();
        let base = format!("rust:{}-", minor.join("."));
        assert!(
            file.contains(&base),
            "the file builds on another image than {base}"
        );
        let packages: Vec<&str> = file
            .split("--path ")
            .skip(1)
            .filter_map(|rest| rest.split(' ').next())
            .collect();
        assert_eq!(packages.len(), 2, "{packages:?}");
        for package in packages {
            assert!(
                root.join(package).join("Cargo.toml").is_file(),
                "{package} is no package"
            );
        }
    }
}
