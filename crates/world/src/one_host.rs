//! Where the ranks of one host meet without an address: a file that is named after the process that started them.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;

use ftcore::{Error, ErrorKind, Result};

/// A file that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct RemovedFile(pub(crate) PathBuf);

impl Drop for RemovedFile {
    fn drop(&mut self) {
        // Left behind at worst: its name does not come again.
        let _ = fs::remove_file(&self.0);
    }
}

/// The file for the job of this process, in a folder of this user's own. `variable` tells the job's processes from the one that started them.
///
/// Errors: `Io` with the path; `Conflict` if another user has the folder.
pub(crate) fn file(variable: &str) -> Result<PathBuf> {
    let user = rustix::process::getuid().as_raw();
    let folder = std::env::temp_dir().join(format!("oxccl-{user}"));
    let failed = |e: std::io::Error| Error::io(format!("making {}", folder.display()), e);
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(failed(e)),
        _ => {}
    }
    // Not through a link that another user has put there.
    let found = fs::symlink_metadata(&folder).map_err(failed)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        return Err(Error::new(
            ErrorKind::Conflict,
            format!(
                "{} is not a folder of this user's alone; remove it, or set MASTER_ADDR",
                folder.display()
            ),
        ));
    }
    let (launcher, started) = launcher(variable);
    Ok(folder.join(format!("job-{launcher}-{started}")))
}

/// The process that started the job, and when: the nearest ancestor without `variable`, so that shells and wrappers between it and a rank do
/// not count. A number alone would come again.
fn launcher(variable: &str) -> (u32, u64) {
    let mut process = std::os::unix::process::parent_id();
    while process > 1
        && has_variable(process, variable)
        && let Some((parent, _)) = status(process)
    {
        process = parent;
    }
    (process, status(process).map_or(0, |(_, started)| started))
}

/// False for a process whose environment may not be read.
fn has_variable(process: u32, variable: &str) -> bool {
    let environment = fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
    environment.split(|b| *b == 0).any(|entry| {
        entry
            .strip_prefix(variable.as_bytes())
            .is_some_and(|rest| rest.first() == Some(&b'='))
    })
}

/// A process's parent and start time, in ticks since boot (proc(5), fields 4 and 22 of `stat`).
fn status(process: u32) -> Option<(u32, u64)> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may have anything in it.
    let (_, fields) = text.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    let parent = fields.nth(1)?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some((parent, started))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn wrappers_between_the_launcher_and_a_rank_do_not_count() {
        if std::env::var_os("OXCCL_TEST_ONE_HOST").is_some() {
            println!("found {:?}", launcher("OXCCL_TEST_ONE_HOST").0);
            return;
        }
        let me = std::env::current_exe().unwrap();
        let name = "one_host::tests::wrappers_between_the_launcher_and_a_rank_do_not_count";
        for wrapped in [false, true] {
            let mut command = match wrapped {
                false => Command::new(&me),
                true => {
                    let mut shell = Command::new("sh");
                    // A second command, so that the shell stays.
                    shell.args(["-c", "\"$0\" \"$@\"; exit $?"]).arg(&me);
                    shell
                }
            };
            let output = command
                .args(["--exact", name, "--nocapture"])
                .env("OXCCL_TEST_ONE_HOST", "1")
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                text.contains(&format!("found {}", std::process::id())),
                "{wrapped}: {text}"
            );
        }
    }
}
