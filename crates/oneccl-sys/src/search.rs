//! Where the library is looked for.
//!
//! 1. `OXCCL_XCCL_PATH`: the file, or a folder that has it (itself or in `lib`). If it is set, nothing else is tried.
//! 2. `CCL_ROOT` (set by Intel's `setvars.sh` and by modules): `$CCL_ROOT/lib`.
//! 3. What `pip install oneccl` made: its libraries go into the `lib` folder of the Python installation, which is taken
//!    from `VIRTUAL_ENV`, `CONDA_PREFIX`, the first `python3` on `PATH` (as it is found there, and where its link leads),
//!    and `~/.local`.
//! 4. The loader's own path (`LD_LIBRARY_PATH`, `ldconfig`).

use std::path::{Path, PathBuf};

/// The library's file.
pub const LIBRARY: &str = "libccl.so.2";
/// Names the library's file or folder.
pub const ENV_PATH: &str = "OXCCL_XCCL_PATH";

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
    if let Some(root) = variable("CCL_ROOT") {
        try_file(&mut found, root.join("lib").join(LIBRARY), "CCL_ROOT");
    }
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = variable(name) {
            try_file(&mut found, prefix.join("lib").join(LIBRARY), name);
        }
    }
    for prefix in variable("PATH").iter().flat_map(|path| python_prefixes(path)) {
        try_file(&mut found, prefix.join("lib").join(LIBRARY), "python3 on PATH");
    }
    if let Some(home) = variable("HOME") {
        try_file(&mut found, home.join(".local/lib").join(LIBRARY), "~/.local");
    }
    if found.file.is_none() {
        found.searched.push(format!("{LIBRARY} (the loader's path)"));
        found.file = Some(PathBuf::from(LIBRARY));
    }
    found
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
        let root = std::env::temp_dir().join(format!("oxccl-search-{}-{name}", std::process::id()));
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "").unwrap();
        root
    }

    #[test]
    fn the_path_that_the_user_named_is_the_only_one_tried() {
        let root = folder("named", "lib/libccl.so.2");
        let other = folder("other", "lib/libccl.so.2");
        let with = |path: PathBuf| {
            find_with(|name| match name {
                ENV_PATH => Some(path.clone()),
                "CCL_ROOT" => Some(other.clone()),
                _ => None,
            })
        };
        assert_eq!(with(root.clone()).file, Some(root.join("lib/libccl.so.2")));
        assert_eq!(with(root.join("lib")).file, Some(root.join("lib/libccl.so.2")));
        let file = root.join("lib/libccl.so.2");
        assert_eq!(with(file.clone()).file, Some(file));
        let nowhere = with(root.join("nowhere"));
        assert_eq!(nowhere.file, None);
        assert_eq!(nowhere.searched.len(), 1);
        assert!(nowhere.searched[0].contains("nowhere"), "{:?}", nowhere.searched);
        std::fs::remove_dir_all(root).unwrap();
        std::fs::remove_dir_all(other).unwrap();
    }

    #[test]
    fn the_first_python_on_the_path_stands_for_its_virtual_environment_and_then_for_its_installation() {
        let (python, venv) = (folder("python", "bin/python3"), folder("env", "bin/activate"));
        std::os::unix::fs::symlink(python.join("bin/python3"), venv.join("bin/python3")).unwrap();
        let found = || find_with(|name| (name == "PATH").then(|| venv.join("bin")));
        let library = |root: &Path| {
            std::fs::create_dir_all(root.join("lib")).unwrap();
            std::fs::write(root.join("lib").join(LIBRARY), "").unwrap();
            root.canonicalize().unwrap().join("lib").join(LIBRARY)
        };
        let in_python = library(&python);
        assert_eq!(found().file.unwrap().canonicalize().unwrap(), in_python);
        let in_venv = library(&venv);
        assert_eq!(found().file.unwrap().canonicalize().unwrap(), in_venv);
        std::fs::remove_dir_all(python).unwrap();
        std::fs::remove_dir_all(venv).unwrap();
    }

    #[test]
    fn roots_come_in_their_order_and_the_loader_is_last() {
        let (ccl, venv) = (
            folder("ccl", "lib/libccl.so.2"),
            folder("venv", "lib/libccl.so.2"),
        );
        let both = find_with(|name| match name {
            "CCL_ROOT" => Some(ccl.clone()),
            "VIRTUAL_ENV" => Some(venv.clone()),
            _ => None,
        });
        assert_eq!(both.file, Some(ccl.join("lib/libccl.so.2")));
        let none = find_with(|_| None);
        assert_eq!(none.file, Some(PathBuf::from(LIBRARY)));
        assert_eq!(none.searched.len(), 1);
        std::fs::remove_dir_all(ccl).unwrap();
        std::fs::remove_dir_all(venv).unwrap();
    }
}
