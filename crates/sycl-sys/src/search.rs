//! Where dpctl's library is looked for.
//!
//! 1. `OXCCL_SYCL_PATH`: the file, or a folder that has it (itself or in `lib`). If it is set, nothing else is tried.
//! 2. The folder of `OXCCL_XCCL_PATH` (itself or `lib`), where `cargo xtask oneccl --sycl` puts everything together.
//! 3. What `pip install dpctl` made: `lib/python3.*/site-packages/dpctl` of the Python installation, which is taken from
//!    `VIRTUAL_ENV`, `CONDA_PREFIX`, the first `python3` on `PATH` (as it is found there, and where its link leads), and
//!    `~/.local`.
//! 4. The loader's own path (`LD_LIBRARY_PATH`, `ldconfig`).

use std::path::{Path, PathBuf};

use vendor::search::{self, Found, Variable};

/// The library's file.
pub const LIBRARY: &str = "libDPCTLSyclInterface.so";
/// Names the library's file or folder.
pub const ENV_PATH: &str = "OXCCL_SYCL_PATH";
/// Names oneCCL's file or folder; see `oneccl-sys`.
const ENV_ONECCL: &str = "OXCCL_XCCL_PATH";

/// Finds the library with the process's environment.
pub fn find() -> Found {
    find_with(&search::variable)
}

/// The folders in which `file`'s own libraries may lie: its own, and the `lib` of the Python installation around it.
pub fn folders(file: &Path) -> Vec<PathBuf> {
    let own = file.parent().filter(|p| !p.as_os_str().is_empty());
    let around = own
        .and_then(|p| p.ancestors().nth(3))
        .filter(|p| p.ends_with("lib"));
    own.into_iter().chain(around).map(Path::to_path_buf).collect()
}

fn find_with(variable: Variable<'_>) -> Found {
    if let Some(found) = Found::named(LIBRARY, ENV_PATH, variable) {
        return found;
    }
    let mut found = Found::default();
    if let Some(beside) = variable(ENV_ONECCL) {
        let folder = match beside.is_dir() {
            true => beside,
            false => beside.parent().map(Path::to_path_buf).unwrap_or_default(),
        };
        for folder in [folder.join("lib"), folder] {
            found.look(folder.join(LIBRARY), ENV_ONECCL);
        }
    }
    for (prefix, of) in search::pythons(variable) {
        for packages in search::packages(&prefix) {
            found.look(packages.join("dpctl").join(LIBRARY), of);
        }
    }
    found.or_by_the_loader(LIBRARY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str, file: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("oxccl-sycl-search-{}-{name}", std::process::id()));
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "").unwrap();
        root
    }

    #[test]
    fn the_folder_of_oneccl_comes_before_python_s_and_the_newest_python_first() {
        let beside = folder("beside", "lib/libDPCTLSyclInterface.so");
        let venv = folder(
            "venv",
            "lib/python3.9/site-packages/dpctl/libDPCTLSyclInterface.so",
        );
        folder(
            "venv",
            "lib/python3.12/site-packages/dpctl/libDPCTLSyclInterface.so",
        );
        let with = |oneccl: bool| {
            find_with(&|name| match name {
                ENV_ONECCL if oneccl => Some(beside.clone()),
                "VIRTUAL_ENV" => Some(venv.clone()),
                _ => None,
            })
        };
        assert_eq!(with(true).file, Some(beside.join("lib").join(LIBRARY)));
        let file = with(false).file.unwrap();
        assert!(
            file.starts_with(venv.join("lib/python3.12")),
            "{}",
            file.display()
        );
        assert_eq!(
            folders(&file),
            [file.parent().unwrap().to_path_buf(), venv.join("lib")]
        );
        std::fs::remove_dir_all(beside).unwrap();
        std::fs::remove_dir_all(venv).unwrap();
    }

    #[test]
    fn the_loader_is_the_last_resort() {
        let none = find_with(&|_| None);
        assert_eq!(none.file, Some(PathBuf::from(LIBRARY)));
        assert!(folders(Path::new(LIBRARY)).is_empty());
    }
}
