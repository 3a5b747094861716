//! Where dpctl's library is looked for.
//!
//! 1. `OXCCL_SYCL_PATH`: the file, or a folder that has it (itself or in `lib`). If it is set, nothing else is tried.
//! 2. The folder of `OXCCL_XCCL_PATH` (itself or `lib`), where `cargo xtask oneccl --sycl` puts everything together.
//! 3. What `pip install dpctl` made: `lib/python3.*/site-packages/dpctl` of the Python installation, which is taken from
//!    `VIRTUAL_ENV`, `CONDA_PREFIX`, the first `python3` on `PATH` (as it is found there, and where its link leads), and
//!    `~/.local`.
//! 4. The loader's own path (`LD_LIBRARY_PATH`, `ldconfig`).

use std::path::{Path, PathBuf};

/// The library's file.
pub const LIBRARY: &str = "libDPCTLSyclInterface.so";
/// Names the library's file or folder.
pub const ENV_PATH: &str = "OXCCL_SYCL_PATH";
/// Names oneCCL's file or folder; see `oneccl-sys`.
const ENV_ONECCL: &str = "OXCCL_XCCL_PATH";

/// What was found, and where it was looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The file; a bare name is for the loader's path.
    pub file: Option<PathBuf>,
    /// Every place that was tried, in order.
    pub searched: Vec<String>,
}

/// Finds the library with the process's environment.
pub fn find() -> Found {
    find_with(|name| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| !p.as_os_str().is_empty())
    })
}

/// The folders in which `file`'s own libraries may lie: its own, and the `lib` of the Python installation around it.
pub fn folders(file: &Path) -> Vec<PathBuf> {
    let own = file.parent().filter(|p| !p.as_os_str().is_empty());
    let around = own
        .and_then(|p| p.ancestors().nth(3))
        .filter(|p| p.ends_with("lib"));
    own.into_iter().chain(around).map(Path::to_path_buf).collect()
}

fn find_with(variable: impl Fn(&str) -> Option<PathBuf>) -> Found {
    let mut found = Found::default();
    let try_file = |found: &mut Found, file: PathBuf, of: &str| {
        found.searched.push(format!("{} ({of})", file.display()));
        if found.file.is_none() && file.is_file() {
            found.file = Some(file);
        }
    };
    if let Some(named) = variable(ENV_PATH) {
        if named.is_dir() {
            try_file(&mut found, named.join(LIBRARY), ENV_PATH);
            try_file(&mut found, named.join("lib").join(LIBRARY), ENV_PATH);
        } else {
            try_file(&mut found, named, ENV_PATH);
        }
        return found;
    }
    if let Some(beside) = variable(ENV_ONECCL) {
        let folder = match beside.is_dir() {
            true => beside,
            false => beside.parent().map(Path::to_path_buf).unwrap_or_default(),
        };
        for folder in [folder.join("lib"), folder] {
            try_file(&mut found, folder.join(LIBRARY), ENV_ONECCL);
        }
    }
    let mut prefixes: Vec<(PathBuf, &str)> = Vec::new();
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        prefixes.extend(variable(name).map(|p| (p, name)));
    }
    let python = variable("PATH").map(|path| python_prefixes(&path));
    prefixes.extend(python.into_iter().flatten().map(|p| (p, "python3 on PATH")));
    prefixes.extend(variable("HOME").map(|h| (h.join(".local"), "~/.local")));
    for (prefix, of) in prefixes {
        for packages in site_packages(&prefix) {
            try_file(&mut found, packages.join("dpctl").join(LIBRARY), of);
        }
    }
    if found.file.is_none() {
        found.searched.push(format!("{LIBRARY} (the loader's path)"));
        found.file = Some(PathBuf::from(LIBRARY));
    }
    found
}

/// `lib/python3.*/site-packages`, the newest Python first.
fn site_packages(prefix: &Path) -> Vec<PathBuf> {
    let minor = |p: &Path| {
        let name = p.file_name()?.to_str()?;
        name.strip_prefix("python3.")?.parse::<u32>().ok()
    };
    let entries = std::fs::read_dir(prefix.join("lib")).into_iter().flatten();
    let mut pythons: Vec<(u32, PathBuf)> = entries
        .flatten()
        .map(|e| e.path())
        .filter_map(|p| Some((minor(&p)?, p)))
        .collect();
    pythons.sort_unstable_by(|a, b| b.cmp(a));
    let folders = pythons.into_iter().map(|(_, p)| p.join("site-packages"));
    folders.filter(|p| p.is_dir()).collect()
}

/// The folders above `bin` of the first `python3`: that of the virtual environment that it is the link of, if it is one, and that of the
/// installation itself.
fn python_prefixes(path: &Path) -> Vec<PathBuf> {
    let mut programs = std::env::split_paths(path).map(|folder| folder.join("python3"));
    let Some(program) = programs.find(|p| p.is_file()) else {
        return Vec::new();
    };
    let prefix = |program: &Path| Some(program.parent()?.parent()?.to_path_buf());
    let itself = program.canonicalize().ok();
    let mut prefixes: Vec<PathBuf> = [Some(program), itself]
        .into_iter()
        .flatten()
        .filter_map(|program| prefix(&program))
        .collect();
    prefixes.dedup();
    prefixes
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
    fn the_path_that_the_user_named_is_the_only_one_tried() {
        let root = folder("named", "lib/libDPCTLSyclInterface.so");
        let with = |path: PathBuf| find_with(|name| (name == ENV_PATH).then(|| path.clone()));
        let file = root.join("lib").join(LIBRARY);
        assert_eq!(with(root.clone()).file, Some(file.clone()));
        assert_eq!(with(file.clone()).file, Some(file));
        let nowhere = with(root.join("nowhere"));
        assert_eq!((nowhere.file, nowhere.searched.len()), (None, 1));
        std::fs::remove_dir_all(root).unwrap();
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
            find_with(|name| match name {
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
    fn the_first_python_on_the_path_stands_for_its_virtual_environment_and_then_for_its_installation() {
        const PLACE: &str = "lib/python3.12/site-packages/dpctl/libDPCTLSyclInterface.so";
        let (python, venv) = (folder("python", PLACE), folder("env", "bin/activate"));
        folder("python", "bin/python3");
        std::os::unix::fs::symlink(python.join("bin/python3"), venv.join("bin/python3")).unwrap();
        let found = || {
            find_with(|name| (name == "PATH").then(|| venv.join("bin")))
                .file
                .unwrap()
        };
        assert!(found().starts_with(python.canonicalize().unwrap()));
        folder("env", PLACE);
        assert!(found().starts_with(&venv));
        std::fs::remove_dir_all(python).unwrap();
        std::fs::remove_dir_all(venv).unwrap();
    }

    #[test]
    fn the_loader_is_the_last_resort() {
        let none = find_with(|_| None);
        assert_eq!(none.file, Some(PathBuf::from(LIBRARY)));
        assert!(folders(Path::new(LIBRARY)).is_empty());
    }
}
