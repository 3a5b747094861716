//! Where packages put a vendor's library: what the user named comes first and alone, then what was installed for a Python, then the loader's path.

use std::path::{Path, PathBuf};

/// An environment variable by its name; one that is empty is none.
pub type Variable<'a> = &'a dyn Fn(&str) -> Option<PathBuf>;

/// A variable of this process.
pub fn variable(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).map(PathBuf::from);
    value.filter(|v| !v.as_os_str().is_empty())
}

/// What was found, and where it was looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    /// The file; a bare name is for the loader's path.
    pub file: Option<PathBuf>,
    /// Every place that was tried, in order, and what named it.
    pub searched: Vec<String>,
}

impl Found {
    /// `library` where the user put it, if `variable` (named `of`) has a value: the file itself, or a folder that has it, itself or in `lib`.
    /// Nothing else is tried then.
    pub fn named(library: &str, of: &str, variable: Variable<'_>) -> Option<Self> {
        let named = variable(of)?;
        let mut found = Self::default();
        if named.is_dir() {
            found.look(named.join(library), of);
            found.look(named.join("lib").join(library), of);
        } else {
            found.look(named, of);
        }
        Some(found)
    }

    /// Looks for `file`, which `of` led to. The first that is there stays.
    pub fn look(&mut self, file: PathBuf, of: &str) {
        self.searched.push(format!("{} ({of})", file.display()));
        if self.file.is_none() && file.is_file() {
            self.file = Some(file);
        }
    }

    /// Leaves it to the loader's path if nothing was found.
    #[must_use]
    pub fn or_by_the_loader(mut self, library: &str) -> Self {
        if self.file.is_none() {
            self.searched.push(format!("{library} (the loader's path)"));
            self.file = Some(PathBuf::from(library));
        }
        self
    }
}

/// The installations of Python that a program may mean, in order, and what names each: `VIRTUAL_ENV`, `CONDA_PREFIX`, the first `python3` on
/// `PATH` (as it is found there, and where its link leads), and `~/.local`.
pub fn pythons(variable: Variable<'_>) -> Vec<(PathBuf, &'static str)> {
    let mut found: Vec<(PathBuf, &'static str)> = Vec::new();
    for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        found.extend(variable(name).map(|prefix| (prefix, name)));
    }
    let on_path = variable("PATH").map(|path| of_first_python(&path));
    found.extend(
        on_path
            .into_iter()
            .flatten()
            .map(|prefix| (prefix, "python3 on PATH")),
    );
    found.extend(variable("HOME").map(|home| (home.join(".local"), "~/.local")));
    found
}

/// The folders above `bin` of the first `python3`: that of the virtual environment that it is the link of, if it is one, and that of the
/// installation itself.
fn of_first_python(path: &Path) -> Vec<PathBuf> {
    let mut programs = std::env::split_paths(path).map(|folder| folder.join("python3"));
    let Some(program) = programs.find(|p| p.is_file()) else {
        return Vec::new();
    };
    let itself = program.canonicalize().ok();
    let programs = [Some(program), itself].into_iter().flatten();
    let mut prefixes: Vec<PathBuf> = programs
        .filter_map(|program| Some(program.parent()?.parent()?.to_path_buf()))
        .collect();
    prefixes.dedup();
    prefixes
}

/// The folders of packages below an installation of Python, those of the newest Python first.
pub fn packages(prefix: &Path) -> Vec<PathBuf> {
    let libs = ["lib", "lib64"].map(|lib| std::fs::read_dir(prefix.join(lib)));
    let entries = libs.into_iter().flatten().flatten().flatten();
    let mut pythons: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| Some((minor(entry.file_name().to_str()?)?, entry.path())))
        .collect();
    // By number: 3.9 is older than 3.12.
    pythons.sort_unstable_by(|a, b| b.cmp(a));
    let folders = pythons
        .into_iter()
        .flat_map(|(_, python)| ["site-packages", "dist-packages"].map(|name| python.join(name)));
    folders.filter(|folder| folder.is_dir()).collect()
}

/// The 12 of `python3.12`, also of a build such as `python3.13t`; Debian's `python3` is the oldest.
fn minor(folder: &str) -> Option<u32> {
    let rest = folder.strip_prefix("python3")?;
    let digits = rest
        .trim_start_matches('.')
        .split(|c: char| !c.is_ascii_digit())
        .next();
    Some(digits.and_then(|d| d.parse().ok()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const LIBRARY: &str = "libvendor.so.1";

    fn make(root: &Path, file: &str) -> PathBuf {
        let file = root.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, "").unwrap();
        file
    }

    #[test]
    fn the_path_that_the_user_named_is_the_only_one_tried() {
        let root = tempfile::tempdir().unwrap();
        let file = make(root.path(), "lib/libvendor.so.1");
        let named = |path: &Path| {
            let path = path.to_path_buf();
            Found::named(LIBRARY, "NAMED", &|name| (name == "NAMED").then(|| path.clone())).unwrap()
        };
        for path in [root.path(), &root.path().join("lib"), &file] {
            assert_eq!(named(path).file, Some(file.clone()), "{}", path.display());
        }
        let nowhere = root.path().join("nowhere");
        let searched = vec![format!("{} (NAMED)", nowhere.display())];
        assert_eq!(named(&nowhere), Found { file: None, searched });
        assert_eq!(Found::named(LIBRARY, "NAMED", &|_| None), None);
    }

    #[test]
    fn the_first_place_that_has_it_stays_and_the_loader_is_the_last_resort() {
        let root = tempfile::tempdir().unwrap();
        let (first, second) = (make(root.path(), "a/x.so"), make(root.path(), "b/x.so"));
        let mut found = Found::default();
        found.look(root.path().join("none/x.so"), "NONE");
        found.look(first.clone(), "A");
        found.look(second, "B");
        let found = found.or_by_the_loader(LIBRARY);
        assert_eq!((found.file, found.searched.len()), (Some(first), 3));
        let none = Found::default().or_by_the_loader(LIBRARY);
        let searched = vec![format!("{LIBRARY} (the loader's path)")];
        assert_eq!(
            (none.file, none.searched),
            (Some(PathBuf::from(LIBRARY)), searched)
        );
    }

    #[test]
    fn pythons_come_in_their_order_and_the_first_on_the_path_stands_for_its_environment_and_then_for_its_installation()
     {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        make(root.path(), "python/bin/python3");
        make(root.path(), "later/bin/python3");
        fs::create_dir_all(at("env/bin")).unwrap();
        symlink(at("python/bin/python3"), at("env/bin/python3")).unwrap();
        let path = std::env::join_paths(["nothing", "env/bin", "later/bin"].map(at)).unwrap();
        let found = pythons(&|name| match name {
            "PATH" => Some(PathBuf::from(&path)),
            "VIRTUAL_ENV" => Some(at("venv")),
            "CONDA_PREFIX" => Some(at("conda")),
            "HOME" => Some(at("home")),
            _ => None,
        });
        let expected = [
            (at("venv"), "VIRTUAL_ENV"),
            (at("conda"), "CONDA_PREFIX"),
            (at("env"), "python3 on PATH"),
            (at("python").canonicalize().unwrap(), "python3 on PATH"),
            (at("home/.local"), "~/.local"),
        ];
        assert_eq!(found, expected);
        assert_eq!(pythons(&|_| None), []);
    }

    #[test]
    fn packages_of_the_newest_python_come_first() {
        let root = tempfile::tempdir().unwrap();
        let expected = [
            "lib/python3.13t/site-packages",
            "lib64/python3.12/site-packages",
            "lib/python3.12/dist-packages",
            "lib/python3.9/site-packages",
            "lib/python3/dist-packages",
        ]
        .map(|folder| root.path().join(folder));
        for folder in &expected {
            fs::create_dir_all(folder).unwrap();
        }
        fs::create_dir_all(root.path().join("lib/perl5/site-packages")).unwrap();
        assert_eq!(packages(root.path()), expected);
        assert_eq!(packages(&root.path().join("nowhere")), [] as [PathBuf; 0]);
    }
}
