//! Vendor libraries out of PyPI's wheels, for tests: pinned by version and hash, fetched once into the user's cache folder.
//!
//! [`make_once`] makes a folder that counts once it is whole; a lock lets several runs wait for one.
//! Inside it, [`download`] fetches wheels with pip, which checks their hashes, and [`unpack`] takes single files out of one.
//! The libraries' licences forbid shipping them, so nothing of them enters the repository.

use std::env;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{FlockOperation, flock};

use crate::metadata::Metadata;
use crate::process::{self, Output};

/// Hundreds of megabytes over a slow line.
const DOWNLOAD_LIMIT: Duration = Duration::from_secs(900);
const UNPACK_LIMIT: Duration = Duration::from_secs(300);

/// Takes files out of a wheel, by the ends of their names: `python3 -c … WHEEL FOLDER END=NAME …`.
const UNPACK: &str = "
import shutil, sys, zipfile
wheel, folder, *wanted = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for pair in wanted:
        end, name = pair.split('=')
        found = [n for n in archive.namelist() if n.endswith(end)]
        if len(found) != 1:
            sys.exit(f'{wheel} has {len(found)} files that end in {end}')
        with archive.open(found[0]) as source, open(f'{folder}/{name}', 'wb') as target:
            shutil.copyfileobj(source, target, 1 << 20)
";

/// The context of an error that is this machine's or its network's, not ours: the index was not reached, or does not have the file.
#[derive(Debug)]
pub(crate) struct Unfetched;

impl fmt::Display for Unfetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("wheels cannot be fetched here")
    }
}

/// An error that is this machine's: what it lacks.
#[derive(Debug)]
pub(crate) struct Lacks(pub(crate) String);

impl fmt::Display for Lacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Lacks {}

/// True if this machine could have what was to be prepared, and only we fail to.
pub(crate) fn is_defect(error: &anyhow::Error) -> bool {
    !error.is::<Unfetched>() && !error.is::<Lacks>()
}

/// One wheel for Linux on x86-64.
pub(crate) struct Wheel {
    /// The project's name on PyPI.
    pub(crate) name: &'static str,
    pub(crate) version: &'static str,
    /// Of the file, in hexadecimal digits.
    pub(crate) sha256: &'static str,
}

/// A folder in the cache and how it is made.
pub(crate) struct Place<'a> {
    /// The folder's name, with a version in it.
    pub(crate) folder: &'a str,
    /// Changed when what is made of the wheels changes, so that an older result is made again.
    pub(crate) recipe: &'a str,
    /// Printed when it has to be made: what is fetched, and how large it is.
    pub(crate) notice: &'a str,
}

/// oxccl's folder in the user's cache; without a user's, one below the target directory.
pub(crate) fn cache() -> Result<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let user = named("XDG_CACHE_HOME").or_else(|| named("HOME").map(|h| h.join(".cache")));
    let cache = match user {
        Some(user) => user.join("oxccl"),
        None => Metadata::read()?.target_directory.join("xtask/cache"),
    };
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    Ok(cache)
}

/// The folder of `place` if it is there already and made by the present recipe.
pub(crate) fn found(place: &Place<'_>) -> Result<Option<PathBuf>> {
    let folder = cache()?.join(place.folder);
    Ok(is_complete(&folder, place.recipe).then_some(folder))
}

fn is_complete(folder: &Path, recipe: &str) -> bool {
    fs::read_to_string(folder.join("RECIPE")).is_ok_and(|r| r == recipe)
}

/// The folder of `place`: found, or filled by `build`, which gets it empty. What an interrupted `build` left has no recipe, and is made anew.
pub(crate) fn make_once(place: &Place<'_>, build: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let cache = cache()?;
    let folder = cache.join(place.folder);
    let path = cache.join(format!("{}.lock", place.folder));
    let lock = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    // Another run may be at it: then its result is taken.
    flock(&lock, FlockOperation::LockExclusive).context("cannot lock the cache")?;
    if is_complete(&folder, place.recipe) {
        return Ok(folder);
    }
    println!("{}", place.notice);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let made = build(&folder)
        .and_then(|()| fs::write(folder.join("RECIPE"), place.recipe).context("cannot write RECIPE"));
    if made.is_err() {
        let _ = fs::remove_dir_all(&folder);
    }
    made.map(|()| folder)
}

/// The folder of `place` with `files` of one wheel ([`unpack`]): found, or made on the first call.
pub(crate) fn kept(place: &Place<'_>, wheel: &Wheel, files: &[&str]) -> Result<PathBuf> {
    for_this_platform(wheel.name)?;
    if let Some(folder) = found(place)? {
        return Ok(folder);
    }
    needs("python3", "fetches wheels with pip")?;
    make(place, |fresh, work, log| {
        download(std::slice::from_ref(wheel), None, work, log)?;
        unpack(work, wheel.name, fresh, files, log)
    })
    .with_context(|| format!("{} {} could not be prepared", wheel.name, wheel.version))
}

/// Errors: [`Lacks`] where wheels of `name` do not run.
pub(crate) fn for_this_platform(name: &str) -> Result<()> {
    match cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        true => Ok(()),
        false => Err(Lacks(format!("the wheels of {name} are for Linux on x86-64 only")).into()),
    }
}

/// Errors: [`Lacks`] if there is no such program.
pub(crate) fn needs(program: &str, what_for: &str) -> Result<()> {
    match is_program(program) {
        true => Ok(()),
        false => Err(Lacks(format!("{program} is missing ({what_for})")).into()),
    }
}

/// As [`make_once`]; `build` gets besides a folder for what is only needed on the way, which is removed at its end, and a log.
pub(crate) fn make(
    place: &Place<'_>,
    build: impl FnOnce(&Path, &Path, &Path) -> Result<()>,
) -> Result<PathBuf> {
    make_once(place, |fresh| {
        let (work, log) = (fresh.join("work"), fresh.join("build.log"));
        fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
        build(fresh, &work, &log)?;
        fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))
    })
}

/// Fetches `wheels` into `to`; a file whose hash is another is an error. `python`: those for this version of it, whatever Python runs pip.
pub(crate) fn download(wheels: &[Wheel], python: Option<&str>, to: &Path, log: &Path) -> Result<()> {
    let wanted: String = wheels
        .iter()
        .map(|w| format!("{}=={} --hash=sha256:{}\n", w.name, w.version, w.sha256))
        .collect();
    let list = to.join("requirements.txt");
    fs::write(&list, wanted).with_context(|| format!("cannot write {}", list.display()))?;
    let mut pip = Command::new("python3");
    pip.args([
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-cache-dir",
        "--no-deps",
    ])
    .args(["--only-binary", ":all:", "--require-hashes", "--requirement"])
    .arg(&list)
    .arg("--dest")
    .arg(to);
    pip.args(
        python
            .into_iter()
            .flat_map(|version| ["--python-version", version]),
    );
    fetch(&mut pip, log)
}

/// Runs pip, which downloads. A file with another hash than the pinned one is an error like any other; what else goes wrong
/// with it is [`Unfetched`].
pub(crate) fn fetch(pip: &mut Command, log: &Path) -> Result<()> {
    quietly("pip", pip, DOWNLOAD_LIMIT, log).map_err(|error| {
        let said = fs::read_to_string(log).unwrap_or_default();
        if said.contains("DO NOT MATCH THE HASHES") {
            error
        } else {
            error.context(Unfetched)
        }
    })
}

/// Takes `files` (`end of the name in the wheel=name to write`) out of the wheel of project `name` in `wheels` into `to`.
pub(crate) fn unpack(wheels: &Path, name: &str, to: &Path, files: &[&str], log: &Path) -> Result<()> {
    let mut python = Command::new("python3");
    python
        .args(["-c", UNPACK])
        .arg(wheel_file(wheels, name)?)
        .arg(to)
        .args(files);
    quietly("unpacking", &mut python, UNPACK_LIMIT, log)
}

/// The file that pip left for project `name`.
pub(crate) fn wheel_file(folder: &Path, name: &str) -> Result<PathBuf> {
    let start = format!("{}-", name.replace('-', "_"));
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    entries
        .flatten()
        .map(|e| e.path())
        .find(|p| {
            let name = p.file_name().map(|n| n.to_string_lossy().into_owned());
            name.is_some_and(|n| n.starts_with(&start) && n.ends_with(".whl"))
        })
        .ok_or_else(|| anyhow!("pip left no wheel {start}…"))
}

/// True if a program of this name is on the path.
pub(crate) fn is_program(name: &str) -> bool {
    on_path(&[name]).is_some()
}

/// The first of `names` that is a file in a folder of PATH.
pub(crate) fn on_path(names: &[&str]) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path)
        .flat_map(|folder| names.iter().map(move |name| folder.join(name)))
        .find(|file| file.is_file())
}

/// The innermost cause that an error report names, which is its last line that is not empty.
pub(crate) fn reason(text: &str) -> Option<String> {
    text.lines()
        .map(str::trim)
        .rfind(|l| !l.is_empty())
        .map(str::to_owned)
}

/// Runs a command with its output in `log`, of which the last line becomes the error.
pub(crate) fn quietly(what: &str, command: &mut Command, limit: Duration, log: &Path) -> Result<()> {
    let finished = process::run(command, limit, Output::Log(log), |_| {})?;
    if !finished.is_success() {
        let said = reason(&fs::read_to_string(log).unwrap_or_default());
        bail!("{what}: {}", said.unwrap_or_else(|| finished.describe()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_last_line_that_says_something() {
        assert_eq!(
            reason("a\n  caused by: no host\n\n").as_deref(),
            Some("caused by: no host")
        );
        assert_eq!(reason("\n \n"), None);
    }

    #[test]
    fn what_is_not_on_the_path_is_not_found() {
        assert!(on_path(&["no-such-program-of-ours"]).is_none());
        assert!(on_path(&["no-such-program-of-ours", "sh"]).is_some());
    }

    #[test]
    fn what_this_machine_or_its_network_lacks_is_no_defect_of_ours() {
        let e = needs("no-such-program-of-ours", "tests").unwrap_err();
        assert_eq!(e.to_string(), "no-such-program-of-ours is missing (tests)");
        let prepared = |e: anyhow::Error| e.context("it could not be prepared");
        assert!(!is_defect(&prepared(e)));
        assert!(!is_defect(&prepared(anyhow!("no route").context(Unfetched))));
        assert!(is_defect(&prepared(anyhow!(
            "the wheel has 0 files that end in x"
        ))));
    }

    #[test]
    fn only_a_folder_with_the_present_recipe_counts_as_complete() {
        let folder = env::temp_dir().join(format!("oxccl-wheels-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert!(!is_complete(&folder, "1"));
        fs::write(folder.join("RECIPE"), "0").unwrap();
        assert!(!is_complete(&folder, "1"));
        fs::write(folder.join("RECIPE"), "1").unwrap();
        assert!(is_complete(&folder, "1"));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_wheel_of_a_project_is_not_taken_for_that_of_another() {
        let folder = env::temp_dir().join(format!("oxccl-wheel-names-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for name in ["oneccl_devel-1-py3.whl", "oneccl-1-py3.whl", "oneccl-1.txt"] {
            fs::write(folder.join(name), "").unwrap();
        }
        assert_eq!(
            wheel_file(&folder, "oneccl").unwrap(),
            folder.join("oneccl-1-py3.whl")
        );
        assert_eq!(
            wheel_file(&folder, "oneccl-devel").unwrap(),
            folder.join("oneccl_devel-1-py3.whl")
        );
        assert!(wheel_file(&folder, "nccl").is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
