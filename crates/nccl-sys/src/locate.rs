//! Where `libnccl.so.2` is looked for, in this order:
//!
//! 1. `OXCCL_NCCL_PATH`: the file itself, or a folder that holds it. If it is set, nothing else is tried.
//! 2. The pip wheel (`nvidia-nccl-cu12`, `nvidia-nccl-cu13`): `nvidia/nccl/lib` in the packages of the Pythons that
//!    [`vendor::search::pythons`] lists, of `/usr/local` and of `/usr`, and in the folders of `PYTHONPATH`.
//! 3. The dynamic loader's own search (`LD_LIBRARY_PATH`, `/etc/ld.so.conf`).
//!
//! The wheel comes before the loader, because a program's own environment is meant before the machine's.

use std::path::{Path, PathBuf};

use vendor::search::{self, Variable};

/// Names the file or folder to use, and nothing else.
pub const ENV_PATH: &str = "OXCCL_NCCL_PATH";
/// The library's file name.
pub const FILE: &str = "libnccl.so.2";

/// The candidates in order. The last one may be the bare file name: the loader's search.
pub fn candidates() -> Vec<PathBuf> {
    let machine = ["/usr/local", "/usr"].map(PathBuf::from);
    candidates_by(&search::variable, &machine)
}

/// The same with other variables and another machine's prefixes.
fn candidates_by(variable: Variable<'_>, machine: &[PathBuf]) -> Vec<PathBuf> {
    if let Some(path) = variable(ENV_PATH) {
        return vec![file_in(&path)];
    }
    let pythons = search::pythons(variable).into_iter().map(|(prefix, _)| prefix);
    let prefixes = pythons.chain(machine.iter().cloned());
    let mut packages: Vec<PathBuf> = prefixes.flat_map(|prefix| search::packages(&prefix)).collect();
    if let Some(paths) = variable("PYTHONPATH") {
        packages.extend(std::env::split_paths(&paths));
    }
    let wheels = packages.iter().map(|p| p.join("nvidia/nccl/lib").join(FILE));
    let mut found: Vec<PathBuf> = wheels.filter(|file| file.is_file()).collect();
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let machine = [at("usr-local"), at("usr")];
        let search = |named: Option<PathBuf>| {
            let variable = |name: &str| match name {
                ENV_PATH => named.clone(),
                "VIRTUAL_ENV" => Some(at("venv")),
                "CONDA_PREFIX" => Some(at("conda")),
                "HOME" => Some(at("home")),
                // One without the wheel is passed over.
                "PYTHONPATH" => std::env::join_paths([at("nothing"), at("path")])
                    .ok()
                    .map(Into::into),
                _ => None,
            };
            candidates_by(&variable, &machine)
        };
        assert_eq!(search(None), expected);
        assert_eq!(search(Some(at("else"))), [at("else")]);
        assert_eq!(search(Some(of_path.clone())), [of_path.join(FILE)], "a folder");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
