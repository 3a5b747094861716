//! Where `libnccl.so.2` is looked for, in this order:
//!
//! 1. `OXCCL_NCCL_PATH`: the file itself, or a folder that holds it. If it is set, nothing else is tried.
//! 2. The pip wheel (`nvidia-nccl-cu12`, `nvidia-nccl-cu13`): `<prefix>/lib*/python3*/{site,dist}-packages/nvidia/nccl/lib`
//!    under `VIRTUAL_ENV`, `CONDA_PREFIX`, `~/.local`, `/usr/local` and `/usr`, and in the folders of `PYTHONPATH`.
//! 3. The dynamic loader's own search (`LD_LIBRARY_PATH`, `/etc/ld.so.conf`).
//!
//! The wheel comes before the loader, because a program's own environment is meant before the machine's.

use std::path::{Path, PathBuf};

/// Names the file or folder to use, and nothing else.
pub const ENV_PATH: &str = "OXCCL_NCCL_PATH";
/// The library's file name.
pub const FILE: &str = "libnccl.so.2";

/// The candidates in order. The last one may be the bare file name: the loader's search.
pub fn candidates() -> Vec<PathBuf> {
    let env = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
    if let Some(path) = env(ENV_PATH) {
        return vec![file_in(Path::new(&path))];
    }
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(|v| env(v))
        .map(PathBuf::from)
        .collect();
    prefixes.extend(env("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes.extend(["/usr/local", "/usr"].map(PathBuf::from));
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

/// The wheel's library under one Python prefix: every version of Python, newest name last to first.
fn in_prefix(prefix: &Path) -> Vec<PathBuf> {
    let mut pythons: Vec<PathBuf> = ["lib", "lib64"]
        .iter()
        .filter_map(|lib| std::fs::read_dir(prefix.join(lib)).ok())
        .flat_map(|entries| entries.filter_map(Result::ok))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path())
        .collect();
    pythons.sort();
    pythons
        .iter()
        .rev()
        .flat_map(|p| ["site-packages", "dist-packages"].map(|d| p.join(d)))
        .filter_map(|packages| in_packages(&packages))
        .collect()
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
}
