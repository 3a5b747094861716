//! Where `libnccl.so.2` is looked for, in this order:
//!
//! 1. `OXCCL_NCCL_PATH`: the file itself, or a folder that holds it. If it is set, nothing else is tried.
//! 2. The pip wheel (`nvidia-nccl-cu12`, `nvidia-nccl-cu13`): `<prefix>/lib*/python3*/{site,dist}-packages/nvidia/nccl/lib`
//!    under `VIRTUAL_ENV`, `CONDA_PREFIX`, `~/.local`, `/usr/local` and `/usr`, and in the folders of `PYTHONPATH`.
//! 3. The dynamic loader's own search (`LD_LIBRARY_PATH`, `/etc/ld.so.conf`).
//!
//! The wheel comes before the loader, because a program's own environment is meant before the machine's.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Names the file or folder to use, and nothing else.
pub const ENV_PATH: &str = "OXCCL_NCCL_PATH";
/// The library's file name.
pub const FILE: &str = "libnccl.so.2";

/// The candidates in order. The last one may be the bare file name: the loader's search.
pub fn candidates() -> Vec<PathBuf> {
    candidates_by(&|name| std::env::var_os(name), &["/usr/local", "/usr"])
}

/// The same with other variables and another machine's prefixes.
fn candidates_by(variable: &dyn Fn(&str) -> Option<OsString>, machine: &[&str]) -> Vec<PathBuf> {
    let env = |name: &str| variable(name).filter(|v| !v.is_empty());
    if let Some(path) = env(ENV_PATH) {
        return vec![file_in(Path::new(&path))];
    }
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(|v| env(v))
        .map(PathBuf::from)
        .collect();
    prefixes.extend(env("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes.extend(machine.iter().map(PathBuf::from));
    let mut found: Vec<PathBuf> = prefixes.iter().flat_map(|p| in_prefix(p)).collect();
    if let Some(paths) = env("PYTHONPATH") {
        found.extend(std::env::split_paths(&paths).filter_map(|p| in_packages(&p)));
    }
    found.dedup();
    found.push(PathBuf::from(FILE));
    found
}

/// A folder means the library in it.
pub fn file_in(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(FILE)
    } else {
        path.to_path_buf()
    }
}

/// The wheel's library under one Python prefix: every version of Python, the newest first.
fn in_prefix(prefix: &Path) -> Vec<PathBuf> {
    let mut pythons: Vec<PathBuf> = ["lib", "lib64"]
        .iter()
        .filter_map(|lib| std::fs::read_dir(prefix.join(lib)).ok())
        .flat_map(|entries| entries.filter_map(Result::ok))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path())
        .collect();
    // By number: 3.9 is older than 3.12.
    pythons.sort_by_key(|path| std::cmp::Reverse((minor(path), path.clone())));
    pythons
        .iter()
        .flat_map(|p| ["site-packages", "dist-packages"].map(|d| p.join(d)))
        .filter_map(|packages| in_packages(&packages))
        .collect()
}

/// The 12 of `python3.12`; 0 if there is no number.
fn minor(python: &Path) -> u32 {
    let name = python.file_name().unwrap_or_default().to_string_lossy();
    let number = name.strip_prefix("python3.").and_then(|rest| {
        let digits = rest.split(|c: char| !c.is_ascii_digit()).next();
        digits.and_then(|d| d.parse().ok())
    });
    number.unwrap_or(0)
}

fn in_packages(packages: &Path) -> Option<PathBuf> {
    let file = packages.join("nvidia/nccl/lib").join(FILE);
    file.is_file().then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wheel_of_a_prefix_is_found_and_a_folder_means_the_file_in_it() {
        let dir = std::env::temp_dir().join(format!("oxccl-locate-{}", std::process::id()));
        let lib = dir.join("lib/python3.11/site-packages/nvidia/nccl/lib");
        std::fs::create_dir_all(&lib).unwrap();
        assert!(
            in_prefix(&dir).is_empty(),
            "a folder without the file is not the wheel"
        );
        std::fs::write(lib.join(FILE), b"").unwrap();
        assert_eq!(in_prefix(&dir), [lib.join(FILE)]);
        assert_eq!(file_in(&lib), lib.join(FILE));
        assert_eq!(file_in(&lib.join(FILE)), lib.join(FILE));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_search_goes_in_the_documented_order_and_a_named_path_ends_it() {
        let dir = std::env::temp_dir().join(format!("oxccl-locate-order-{}", std::process::id()));
        let packages = |prefix: &Path, python: &str| prefix.join("lib").join(python).join("site-packages");
        let wheel = |packages: &Path| packages.join("nvidia/nccl/lib");
        let at = |name: &str| dir.join(name);
        let home = at("home").join(".local");
        let prefixes = [at("venv"), at("conda"), home, at("usr-local"), at("usr")];
        let mut expected = Vec::new();
        for prefix in &prefixes {
            // The newest Python first.
            for python in ["python3.9", "python3.12"] {
                let lib = wheel(&packages(prefix, python));
                std::fs::create_dir_all(&lib).unwrap();
                std::fs::write(lib.join(FILE), b"").unwrap();
            }
            let both = ["python3.12", "python3.9"].map(|python| wheel(&packages(prefix, python)).join(FILE));
            expected.extend(both);
        }
        let of_path = wheel(&at("path"));
        std::fs::create_dir_all(&of_path).unwrap();
        std::fs::write(of_path.join(FILE), b"").unwrap();
        expected.extend([of_path.join(FILE), PathBuf::from(FILE)]);
        let machine = [at("usr-local"), at("usr")].map(|p| p.display().to_string());
        let machine: Vec<&str> = machine.iter().map(String::as_str).collect();
        let search = |named: Option<PathBuf>| {
            let variable = |name: &str| -> Option<OsString> {
                match name {
                    ENV_PATH => named.clone().map(Into::into),
                    "VIRTUAL_ENV" => Some(at("venv").into()),
                    "CONDA_PREFIX" => Some(at("conda").into()),
                    "HOME" => Some(at("home").into()),
                    // One without the wheel is passed over.
                    "PYTHONPATH" => std::env::join_paths([at("nothing"), at("path")]).ok(),
                    _ => None,
                }
            };
            candidates_by(&variable, &machine)
        };
        assert_eq!(search(None), expected);
        assert_eq!(
            search(Some(PathBuf::new())),
            expected,
            "an empty variable is none"
        );
        assert_eq!(search(Some(at("else"))), [at("else")]);
        assert_eq!(search(Some(of_path.clone())), [of_path.join(FILE)], "a folder");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
