//! Where the library is looked for.
//!
//! 1. `OXCCL_XCCL_PATH`: the file, or a folder that has it (itself or in `lib`). If it is set, nothing else is tried.
//! 2. `CCL_ROOT` (set by Intel's `setvars.sh` and by modules): `$CCL_ROOT/lib`.
//! 3. What `pip install oneccl` made: its libraries go into the `lib` folder of the Python installation, which is taken
//!    from `VIRTUAL_ENV`, `CONDA_PREFIX`, the first `python3` on `PATH` (as it is found there, and where its link leads),
//!    and `~/.local`.
//! 4. The loader's own path (`LD_LIBRARY_PATH`, `ldconfig`).

use vendor::search::{self, Found, Variable};

/// The library's file.
pub const LIBRARY: &str = "libccl.so.2";
/// Names the library's file or folder.
pub const ENV_PATH: &str = "OXCCL_XCCL_PATH";

/// Finds the library with the process's environment.
pub fn find() -> Found {
    find_with(&search::variable)
}

fn find_with(variable: Variable<'_>) -> Found {
    if let Some(found) = Found::named(LIBRARY, ENV_PATH, variable) {
        return found;
    }
    let root = variable("CCL_ROOT").map(|root| (root, "CCL_ROOT"));
    let mut found = Found::default();
    for (prefix, of) in root.into_iter().chain(search::pythons(variable)) {
        found.look(prefix.join("lib").join(LIBRARY), of);
    }
    found.or_by_the_loader(LIBRARY)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_root_comes_before_python_s_and_what_the_user_named_before_all() {
        let find = |named: Option<&'static str>| {
            find_with(&|name| match name {
                ENV_PATH => named.map(PathBuf::from),
                "CCL_ROOT" => Some("/nowhere/ccl".into()),
                "VIRTUAL_ENV" => Some("/nowhere/venv".into()),
                _ => None,
            })
        };
        let searched = [
            "/nowhere/ccl/lib/libccl.so.2 (CCL_ROOT)",
            "/nowhere/venv/lib/libccl.so.2 (VIRTUAL_ENV)",
            "libccl.so.2 (the loader's path)",
        ];
        let found = find(None);
        assert_eq!(
            (found.file, found.searched),
            (Some(LIBRARY.into()), searched.map(String::from).to_vec())
        );
        let named = find(Some("/nowhere/named"));
        let searched = vec!["/nowhere/named (OXCCL_XCCL_PATH)".to_string()];
        assert_eq!(named, Found { file: None, searched });
    }
}
