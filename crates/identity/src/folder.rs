//! The folder of a job's credentials: made, read, and shown.
//!
//! | file | what | mode |
//! |---|---|---|
//! | `job` | the job's id | 644 |
//! | `secret` | 64 hexadecimal digits that all processes of the job share | 600 |
//! | `ca.pem`, `ca.key` | the job's CA; a process that has the key issues its own certificate in memory | 644, 600 |
//! | `operator.pem`, `operator.key` | the operator's certificate | 644, 600 |
//! | `member.pem`, `member.key` | in a folder for one replica or for the lighthouse, instead of `ca.key` and the operator's: its certificate | 644, 600 |
//! | `revoked`, `revoked.lock` | certificates that were taken back (`revoked.rs`); in folders of servers | 644 |

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ftcore::{Credentials, Error, ErrorKind, Result, identity::check_job};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::trust::{Trust, owner};
use crate::{Role, check_name, server_name};

/// Certificates are valid this much earlier than they are made: clocks differ.
pub(crate) const EARLIER: Duration = Duration::from_secs(24 * 3600);
/// For how long certificates are valid. No connection breaks when the time is over, but no new one is made.
const VALID: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

const PUBLIC: u32 = 0o644;
const PRIVATE: u32 = 0o600;

/// A certificate with its key.
pub(crate) struct Pair {
    pub(crate) certificate: CertificateDer<'static>,
    pub(crate) key: PrivateKeyDer<'static>,
}

/// What a folder holds, beside what [`Credentials`] reads.
pub(crate) struct Folder {
    pub(crate) trust: Trust,
    job: String,
    path: PathBuf,
}

impl Folder {
    pub(crate) fn open(credentials: &Credentials) -> Result<Self> {
        let path = credentials.folder().to_owned();
        let file = path.join("ca.pem");
        let ca =
            CertificateDer::from_pem_slice(&read(&file)?).map_err(|e| malformed(&file, &e.to_string()))?;
        let trust = Trust::new(ca).map_err(|e| malformed(&file, &e))?;
        Ok(Self {
            trust,
            job: credentials.job().to_owned(),
            path,
        })
    }

    pub(crate) fn has(&self, file: &str) -> bool {
        self.path.join(file).exists()
    }

    /// The certificate and key in `NAME.pem` and `NAME.key`, checked against the CA, and the role that it gives.
    pub(crate) fn pair(&self, name: &str) -> Result<(Pair, Role)> {
        let (file, key) = (
            self.path.join(format!("{name}.pem")),
            self.path.join(format!("{name}.key")),
        );
        let certificate =
            CertificateDer::from_pem_slice(&read(&file)?).map_err(|e| malformed(&file, &e.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(&read_private(&key)?)
            .map_err(|e| malformed(&key, &e.to_string()))?;
        self.trust
            .check(&certificate, &self.job, SystemTime::now())
            .map_err(|e| malformed(&file, &e))?;
        let peer =
            owner(Some(std::slice::from_ref(&certificate)), &self.job).map_err(|e| malformed(&file, &e))?;
        Ok((Pair { certificate, key }, peer.role))
    }

    /// A certificate for `role`, issued with `ca.key`.
    pub(crate) fn issue(&self, role: &Role) -> Result<Pair> {
        let file = self.path.join("ca.key");
        let text = String::from_utf8(read_private(&file)?).map_err(|_| malformed(&file, "it is not text"))?;
        let key = KeyPair::from_pem(&text).map_err(|e| malformed(&file, &e.to_string()))?;
        let issued = leaf(&self.job, role, &Issuer::new(ca(&self.job)?, key))?;
        let pair = Pair {
            certificate: issued.0.der().clone(),
            key: PrivatePkcs8KeyDer::from(issued.1.serialize_der()).into(),
        };
        // A key of another CA, most likely.
        self.trust
            .check(&pair.certificate, &self.job, SystemTime::now())
            .map_err(|e| malformed(&file, &format!("what it signs does not fit ca.pem ({e})")))?;
        Ok(pair)
    }
}

/// The parameters of a job's CA. They follow from the id alone: the one that issues needs no more than the key.
fn ca(job: &str) -> Result<CertificateParams> {
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, format!("oxccl job {job}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    valid(&mut params);
    Ok(params)
}

fn valid(params: &mut CertificateParams) {
    let now = SystemTime::now();
    params.not_before = (now - EARLIER).into();
    params.not_after = (now + VALID).into();
}

fn leaf(job: &str, role: &Role, issuer: &Issuer<'_, KeyPair>) -> Result<(rcgen::Certificate, KeyPair)> {
    if let Role::Replica(name) = role {
        check_name(name)?;
    }
    let failed = |e: rcgen::Error| Error::new(ErrorKind::Internal, format!("making a certificate: {e}"));
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, format!("{role} of job {job}"));
    params.subject_alt_names = vec![
        SanType::URI(role.uri(job).try_into().map_err(failed)?),
        SanType::DnsName(server_name(job).try_into().map_err(failed)?),
    ];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    valid(&mut params);
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = params.signed_by(&key, issuer).map_err(failed)?;
    Ok((certificate, key))
}

/// Makes the folder `path` for a new job; `job` is its id, by default a random one. Returns the id.
///
/// Errors: `Conflict` if the folder is not empty, `InvalidArgument` for the id, `Io`.
pub fn create(path: &Path, job: Option<&str>) -> Result<String> {
    let job = match job {
        Some(job) => job.to_owned(),
        None => format!("job-{}", hex(&random::<4>()?)),
    };
    check_job(&job)?;
    let failed = |e: rcgen::Error| Error::new(ErrorKind::Internal, format!("making a certificate: {e}"));
    let params = ca(&job)?;
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = params.self_signed(&key).map_err(failed)?.pem();
    let ca_key = key.serialize_pem();
    let (operator, operator_key) = leaf(&job, &Role::Operator, &Issuer::new(params, key))?;
    let secret = format!("{}\n", hex(&random::<32>()?));
    fill(
        path,
        &[
            ("job", PUBLIC, &format!("{job}\n")),
            ("secret", PRIVATE, &secret),
            ("ca.pem", PUBLIC, &certificate),
            ("ca.key", PRIVATE, &ca_key),
            ("operator.pem", PUBLIC, &operator.pem()),
            ("operator.key", PRIVATE, &operator_key.serialize_pem()),
        ],
    )?;
    Ok(job)
}

/// Makes the folder `out` for the replica `name` of the job in `path`, without what could make other certificates.
///
/// Errors: `InvalidArgument` for the name or a folder without `ca.key`, `Conflict` if `out` is not empty, `Io`.
pub fn issue(path: &Path, name: &str, out: &Path) -> Result<()> {
    issue_for(path, &Role::Replica(name.to_owned()), out)
}

/// Likewise for the job's lighthouse: with it a process can be the lighthouse, and nothing else.
///
/// Errors: as of [`issue`].
pub fn issue_for_lighthouse(path: &Path, out: &Path) -> Result<()> {
    issue_for(path, &Role::Lighthouse, out)
}

fn issue_for(path: &Path, role: &Role, out: &Path) -> Result<()> {
    if let Role::Replica(name) = role {
        check_name(name)?;
    }
    let credentials = Credentials::load(path)?;
    let folder = Folder::open(&credentials)?;
    let ca_key = path.join("ca.key");
    let text = String::from_utf8(read_private(&ca_key)?).map_err(|_| malformed(&ca_key, "it is not text"))?;
    let key = KeyPair::from_pem(&text).map_err(|e| malformed(&ca_key, &e.to_string()))?;
    let job = credentials.job();
    let (certificate, member_key) = leaf(job, role, &Issuer::new(ca(job)?, key))?;
    folder
        .trust
        .check(certificate.der(), job, SystemTime::now())
        .map_err(|e| malformed(&ca_key, &format!("what it signs does not fit ca.pem ({e})")))?;
    let text = |file: &str| {
        let file = path.join(file);
        String::from_utf8(read(&file)?).map_err(|_| malformed(&file, "it is not text"))
    };
    fill(
        out,
        &[
            ("job", PUBLIC, &text("job")?),
            ("secret", PRIVATE, &text("secret")?),
            ("ca.pem", PUBLIC, &text("ca.pem")?),
            ("member.pem", PUBLIC, &certificate.pem()),
            ("member.key", PRIVATE, &member_key.serialize_pem()),
        ],
    )
}

/// What a folder is good for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The job's id.
    pub job: String,
    /// Whom a process with it may be.
    pub may_be: String,
    /// True if it holds the operator's certificate, or the key to make one.
    pub operator: bool,
    /// The last day on which others accept its certificates, `YYYY-MM-DD`.
    pub until: String,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "job       {}", self.job)?;
        writeln!(f, "may be    {}", self.may_be)?;
        writeln!(f, "operator  {}", if self.operator { "yes" } else { "no" })?;
        write!(f, "valid     until {}", self.until)
    }
}

/// Reads the folder `path` and checks all that is in it. Nothing secret is in the answer.
///
/// Errors: `InvalidArgument` that names the file and what is wrong with it.
pub fn show(path: &Path) -> Result<Summary> {
    let credentials = Credentials::load(path)?;
    let folder = Folder::open(&credentials)?;
    let mut certificates = Vec::new();
    let mut operator = false;
    let may_be = if folder.has("ca.key") {
        certificates.push(folder.issue(&Role::Lighthouse)?.certificate);
        operator = true;
        "the lighthouse, and any replica (ca.key is here)".to_owned()
    } else {
        let (pair, role) = folder.pair("member")?;
        certificates.push(pair.certificate);
        format!("{role}, and nothing else")
    };
    if folder.has("operator.pem") {
        certificates.push(folder.pair("operator")?.0.certificate);
        operator = true;
    }
    let job = credentials.job().to_owned();
    let last = certificates
        .iter()
        .map(|c| folder.trust.accepted_until(c, &job))
        .min()
        .flatten()
        .ok_or_else(|| malformed(path, "its certificates are not accepted today"))?;
    Ok(Summary {
        job,
        may_be,
        operator,
        until: date(last),
    })
}

fn date(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    (rcgen::date_time_ymd(1970, 1, 1) + since).date().to_string()
}

/// Writes `files` into the new or empty folder `path`. What is private is so from the first moment.
fn fill(path: &Path, files: &[(&str, u32, &str)]) -> Result<()> {
    let failed = |e: std::io::Error| Error::io(format!("credentials: {}", path.display()), e);
    match fs::read_dir(path) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                return Err(Error::new(
                    ErrorKind::Conflict,
                    format!(
                        "credentials: {} is not empty; choose a new folder, what is in this one stays as it is",
                        path.display()
                    ),
                ));
            }
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(failed)?;
        }
        Err(e) => return Err(failed(e)),
    }
    for (name, mode, text) in files {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(*mode)
            .open(path.join(name))
            .map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)?;
    }
    Ok(())
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("reading random bytes", e.into()))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, b| {
        let _ = write!(text, "{b:02x}");
        text
    })
}

fn malformed(file: &Path, why: &str) -> Error {
    Error::invalid(format!(
        "credentials: {}: {why}; `oxccl credentials new` makes the folder",
        file.display()
    ))
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).map_err(|e| {
        let text = format!(
            "credentials: cannot read {}: {e}; `oxccl credentials new` makes the folder, `issue` one for a replica or the lighthouse",
            file.display()
        );
        Error::invalid(text).with_source(e)
    })
}

/// Like [`read`], for a file that only its owner may read.
fn read_private(file: &Path) -> Result<Vec<u8>> {
    let mode = fs::metadata(file).map(|m| m.permissions().mode()).unwrap_or(0);
    if mode & 0o077 != 0 {
        return Err(Error::invalid(format!(
            "credentials: {} may be read by others than its owner (mode {:o}); chmod 600 it",
            file.display(),
            mode & 0o777
        )));
    }
    read(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(file: &Path) -> u32 {
        fs::metadata(file).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_new_folder_is_private_whole_and_never_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("some/where");
        assert_eq!(create(&path, Some("demo")).unwrap(), "demo");
        assert_eq!(mode(&path), 0o700);
        for (file, expected) in [
            ("job", PUBLIC),
            ("secret", PRIVATE),
            ("ca.pem", PUBLIC),
            ("ca.key", PRIVATE),
            ("operator.pem", PUBLIC),
            ("operator.key", PRIVATE),
        ] {
            assert_eq!(mode(&path.join(file)), expected, "{file}");
        }
        let secret = fs::read_to_string(path.join("secret")).unwrap();
        let e = create(&path, Some("other")).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Conflict);
        assert!(e.message().contains("not empty"), "{e}");
        assert_eq!(fs::read_to_string(path.join("secret")).unwrap(), secret);
        let summary = show(&path).unwrap();
        assert!(
            summary.operator && summary.may_be.contains("any replica"),
            "{summary}"
        );
        assert!(!summary.to_string().contains(secret.trim()));
        let year: i32 = summary.until[..4].parse().unwrap();
        let this: i32 = date(SystemTime::now())[..4].parse().unwrap();
        assert!((9..=10).contains(&(year - this)), "{summary}");
    }

    #[test]
    fn ids_of_new_jobs_differ_and_an_impossible_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let a = create(&dir.path().join("a"), None).unwrap();
        let b = create(&dir.path().join("b"), None).unwrap();
        assert_ne!(a, b);
        for bad in ["", "A", "a/b", "-a"] {
            let e = create(&dir.path().join("c"), Some(bad)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        }
        assert!(!dir.path().join("c").exists());
    }

    #[test]
    fn a_folder_for_a_replica_can_be_that_replica_only() {
        let dir = tempfile::tempdir().unwrap();
        let (job, one) = (dir.path().join("job"), dir.path().join("one"));
        create(&job, Some("demo")).unwrap();
        issue(&job, "trainer-1", &one).unwrap();
        let mut files: Vec<_> = fs::read_dir(&one)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        files.sort();
        assert_eq!(files, ["ca.pem", "job", "member.key", "member.pem", "secret"]);
        assert_eq!(mode(&one.join("member.key")), PRIVATE);
        let summary = show(&one).unwrap();
        assert_eq!(summary.may_be, "replica 'trainer-1', and nothing else");
        assert!(!summary.operator);
        for (name, out, says) in [
            ("a:b", "two", "cannot stand in a certificate"),
            ("", "two", "cannot stand"),
            ("a", "one", "not empty"),
        ] {
            let e = issue(&job, name, &dir.path().join(out)).unwrap_err();
            assert!(e.message().contains(says), "{e}");
        }
        // It has nothing to issue with.
        let e = issue(&one, "trainer-2", &dir.path().join("two")).unwrap_err();
        assert!(e.message().contains("ca.key"), "{e}");
    }

    #[test]
    fn what_is_wrong_with_a_folder_is_named_by_file() {
        let dir = tempfile::tempdir().unwrap();
        let (job, other) = (dir.path().join("job"), dir.path().join("other"));
        create(&job, Some("demo")).unwrap();
        create(&other, Some("demo")).unwrap();
        fs::copy(other.join("ca.key"), job.join("ca.key")).unwrap();
        let e = show(&job).unwrap_err();
        assert!(
            e.message().contains("ca.key") && e.message().contains("does not fit ca.pem"),
            "{e}"
        );
        fs::set_permissions(other.join("ca.key"), fs::Permissions::from_mode(0o640)).unwrap();
        let e = show(&other).unwrap_err();
        assert!(
            e.message().contains("ca.key") && e.message().contains("mode 640"),
            "{e}"
        );
        fs::write(other.join("ca.pem"), "nothing").unwrap();
        let e = show(&other).unwrap_err();
        assert!(e.message().contains("ca.pem"), "{e}");
    }
}
