//! Who belongs to the job: the folder of credentials that `oxccl credentials new` makes, as every listener and caller reads it.
//!
//! The folder holds `job` (the job's id), `secret` (32 bytes in hex, shared by all processes of the job) and the certificates of the control
//! plane, which the crates that speak TLS read from [`Credentials::folder`]. On the data plane both ends of a connection prove the secret by the
//! keyed hello ([`hello`]).

pub mod hello;
mod listening;
pub mod records;
pub mod strangers;

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Result};

pub use listening::{INSECURE, Rarely, TurnedAway, is_insecure, may_listen};

/// The variable that, set to `1`, lets a process with credentials encrypt its data connections.
pub const ENCRYPT: &str = "OXCCL_ENCRYPT";

/// The longest job id, in bytes: it is one label of a host name, where TLS looks for it.
const MAX_JOB: usize = 63;

/// A job's id and secret, with the folder that they came from.
#[derive(Debug)]
pub struct Credentials {
    folder: PathBuf,
    job: String,
    secret: Secret,
    encrypts: bool,
}

impl Credentials {
    /// The variable that names the folder.
    pub const VARIABLE: &str = "OXCCL_CREDENTIALS";

    /// The credentials that [`VARIABLE`](Self::VARIABLE) names; `None` if it is not set or empty. They are read once: a process has the same
    /// ones for its whole life, whatever becomes of the folder.
    ///
    /// Errors: those of [`load`](Self::load); `InvalidArgument` if [`ENCRYPT`] asks for encryption and there are no credentials.
    pub fn from_env() -> Result<Option<Arc<Self>>> {
        static READ: Mutex<Option<(OsString, Arc<Credentials>)>> = Mutex::new(None);
        let Some(folder) = std::env::var_os(Self::VARIABLE).filter(|folder| !folder.is_empty()) else {
            return match encrypt_from_env()? {
                true => Err(without_credentials(&format!("{ENCRYPT}=1"))),
                false => Ok(None),
            };
        };
        let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, credentials)) = &*read
            && *of == folder
        {
            return Ok(Some(credentials.clone()));
        }
        let credentials = Self::load(Path::new(&folder))?;
        *read = Some((folder, credentials.clone()));
        Ok(Some(credentials))
    }

    /// Reads the folder that `oxccl credentials new` made. The data connections are encrypted if [`ENCRYPT`] says so.
    ///
    /// Errors: `InvalidArgument` that names the file and what is wrong with it: missing, malformed, or a secret that others than its owner may read.
    pub fn load(folder: &Path) -> Result<Arc<Self>> {
        let job = read(folder, "job")?;
        let job = job.trim_end();
        check_job(job)
            .map_err(|e| Error::invalid(format!("{}: {}", folder.join("job").display(), e.message())))?;
        let secret = folder.join("secret");
        let mode = fs::metadata(&secret).map(|m| m.permissions().mode()).unwrap_or(0);
        if mode & 0o077 != 0 {
            return Err(Error::invalid(format!(
                "credentials: {} may be read by others than its owner (mode {:o}); chmod 600 it",
                secret.display(),
                mode & 0o777
            )));
        }
        let text = read(folder, "secret")?;
        let bytes = parse_hex(text.trim_end()).ok_or_else(|| {
            Error::invalid(format!(
                "credentials: {} is not 64 hexadecimal digits; make the folder with `oxccl credentials new`",
                secret.display()
            ))
        })?;
        Ok(Arc::new(Self {
            folder: folder.to_owned(),
            job: job.to_owned(),
            secret: Secret(bytes),
            encrypts: encrypt_from_env()?,
        }))
    }

    /// The same credentials, with data connections that are encrypted or not. Both ends of a connection must want the same.
    pub fn with_encryption(&self, encrypts: bool) -> Arc<Self> {
        Arc::new(Self {
            folder: self.folder.clone(),
            job: self.job.clone(),
            secret: Secret(self.secret.0),
            encrypts,
        })
    }

    /// True if what follows the hello on a data connection is encrypted ([`records`]).
    pub fn encrypts(&self) -> bool {
        self.encrypts
    }

    /// Credentials without a folder.
    #[cfg(test)]
    pub(crate) fn in_memory(job: &str, secret: u8) -> Arc<Self> {
        Arc::new(Self {
            folder: "/nowhere".into(),
            job: job.to_owned(),
            secret: Secret([secret; 32]),
            encrypts: false,
        })
    }

    /// Where they were read.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The job's id: lower-case letters, digits and hyphens.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// What all processes of the job share, and no other process knows.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }
}

/// The secret of a job. It is not shown by `Debug` and has no `Display`.
pub struct Secret([u8; 32]);

impl Secret {
    /// The bytes, as a key for a keyed hash; never sent, never logged.
    pub fn key(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Checks that `job` may be a job's id: 1 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends.
///
/// Errors: `InvalidArgument` that shows it.
pub fn check_job(job: &str) -> Result<()> {
    let known = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if job.is_empty()
        || job.len() > MAX_JOB
        || !job.bytes().all(known)
        || job.starts_with('-')
        || job.ends_with('-')
    {
        return Err(Error::invalid(format!(
            "job id {job:?} is not 1 to {MAX_JOB} lower-case letters, digits and hyphens with a letter or digit at both ends"
        )));
    }
    Ok(())
}

/// Encryption was asked for by `what`, and there are no keys for it.
pub(crate) fn without_credentials(what: &str) -> Error {
    Error::invalid(format!(
        "{what} asks for encrypted data connections, and there are no credentials to make keys of; set {} to the folder that `oxccl credentials \
         new` makes, or leave encryption out",
        Credentials::VARIABLE
    ))
}

/// A wish for encryption, as text: `1` or `0`.
pub(crate) fn parse_encrypt(what: &str, text: &str) -> Result<bool> {
    match text.trim() {
        "1" => Ok(true),
        "0" | "" => Ok(false),
        other => Err(Error::invalid(format!(
            "{what}={other} is not known; 1 encrypts data connections, 0 does not"
        ))),
    }
}

fn encrypt_from_env() -> Result<bool> {
    let text = std::env::var_os(ENCRYPT).unwrap_or_default();
    parse_encrypt(ENCRYPT, &text.to_string_lossy())
}

fn read(folder: &Path, name: &str) -> Result<String> {
    let path = folder.join(name);
    fs::read_to_string(&path).map_err(|e| {
        Error::invalid(format!(
            "credentials: cannot read {}: {e}; `oxccl credentials new` makes the folder",
            path.display()
        ))
        .with_source(e)
    })
}

fn parse_hex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    // Digit by digit: `from_str_radix` would take a sign.
    if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * i..2 * i + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    fn folder(job: &str, secret: &str, mode: u32) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("job"), job).unwrap();
        fs::write(folder.path().join("secret"), secret).unwrap();
        fs::set_permissions(folder.path().join("secret"), fs::Permissions::from_mode(mode)).unwrap();
        folder
    }

    #[test]
    fn a_folder_is_read_and_its_secret_is_not_shown() {
        let dir = folder("job-7\n", &format!("{}\n", "0a".repeat(32)), 0o600);
        let credentials = Credentials::load(dir.path()).unwrap();
        assert_eq!(credentials.job(), "job-7");
        assert_eq!(credentials.secret().key(), &[10; 32]);
        assert!(!format!("{credentials:?}").contains("10"), "{credentials:?}");
    }

    #[test]
    fn what_is_wrong_with_a_folder_is_named_and_never_the_secret() {
        let secret = "0b".repeat(32);
        for (job, secret, mode, says) in [
            ("job-7", secret.as_str(), 0o644, "mode 644"),
            ("job-7", "+b0b0b", 0o600, "64 hexadecimal digits"),
            ("job-7", &"+b".repeat(32), 0o600, "64 hexadecimal digits"),
            ("", &secret, 0o600, "job id"),
            ("Job", &secret, 0o600, "job id"),
            ("a-", &secret, 0o600, "job id"),
        ] {
            let dir = folder(job, secret, mode);
            let e = Credentials::load(dir.path()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
            assert!(e.to_string().contains(says), "{e}");
            assert!(!e.to_string().contains("0b0b"), "{e}");
        }
        let e = Credentials::load(Path::new("/nowhere")).unwrap_err();
        assert!(e.to_string().contains("/nowhere/job"), "{e}");
    }

    /// Variables are a process's: what this test says is played by one of its own.
    #[test]
    fn the_environment_asks_for_encryption_and_is_refused_without_credentials() {
        const CHILD: &str = "OXCCL_TEST_ENCRYPT";
        if std::env::var_os(CHILD).is_some() {
            match Credentials::from_env() {
                Ok(found) => println!("encrypts: {:?}", found.map(|c| c.encrypts())),
                Err(e) => println!("{:?}: {e}", e.kind()),
            }
            return;
        }
        let dir = folder("job-7", &"0a".repeat(32), 0o600);
        let folder = dir.path().to_str().unwrap();
        for (encrypt, folder, says) in [
            ("1", folder, "encrypts: Some(true)"),
            ("0", folder, "encrypts: Some(false)"),
            ("", folder, "encrypts: Some(false)"),
            ("0", "", "encrypts: None"),
            ("1", "", "InvalidArgument"),
            ("1", "", "set OXCCL_CREDENTIALS"),
            ("yes", folder, "OXCCL_ENCRYPT=yes is not known"),
            ("yes", "", "OXCCL_ENCRYPT=yes is not known"),
        ] {
            let told = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "--nocapture"])
                .arg(
                    "identity::tests::the_environment_asks_for_encryption_and_is_refused_without_credentials",
                )
                .env(CHILD, "1")
                .env(ENCRYPT, encrypt)
                .env(Credentials::VARIABLE, folder)
                .output()
                .unwrap();
            let told = String::from_utf8_lossy(&told.stdout).into_owned();
            assert!(told.contains(says), "{encrypt}, {folder:?}: {told}");
        }
    }
}
