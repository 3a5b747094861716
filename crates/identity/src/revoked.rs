//! Certificates that were taken back: the file `revoked` in a folder of credentials, one line `NAME SECONDS` for each replica.
//!
//! It takes back all certificates of the replica NAME that were made up to that time (Unix seconds), and none that is made later. A peer that proves
//! itself to a process is looked up there, and the file is read again when it has changed, so no server has to be started again. A file that cannot
//! be read, or is not understood, lets no replica in: a list that is not read would take nothing back.

use std::fmt;
use std::fs::{self, TryLockError};
use std::io::{ErrorKind as IoKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ftcore::{Credentials, Error, ErrorKind, Result};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, SignatureScheme};

use crate::folder::EARLIER;
use crate::trust::{Trust, owner};
use crate::{Role, check_name};

const FILE: &str = "revoked";
/// Who changes the list has this file beside it locked: a lock does not survive the rename of what it is on.
const LOCK: &str = "revoked.lock";
/// How long another change may take. It is a matter of milliseconds, unless that process was stopped.
const LOCK_TIME: Duration = Duration::from_secs(10);
/// No list of ours is longer, in bytes.
const MOST: u64 = 1 << 20;

/// Replica names, and until when certificates of that name are taken back.
type List = Vec<(String, u64)>;
/// What says that a file is another one: when it was changed, its number and its length.
type Stamp = (SystemTime, u64, u64);

/// Takes back every certificate of the replica `name` that was made until now, for the processes that use the folder `path`. Those that are made after its
/// return are none of them: it waits for the end of the present second, for a second at most.
///
/// Errors: `InvalidArgument` for the name, or a folder or list that is none; `Conflict` if another process has been changing the list for 10 s; `Io`.
pub fn revoke(path: &Path, name: &str) -> Result<()> {
    check_name(name)?;
    Credentials::load(path)?;
    let now = add(path, name)?;
    // The list and the certificates tell whole seconds: one that was made in the rest of this one would be taken back, too.
    let end = UNIX_EPOCH + Duration::from_secs(now + 1);
    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
    // No longer than that if the clock was set back meanwhile.
    std::thread::sleep(left.min(Duration::from_secs(1)));
    Ok(())
}

/// Puts `name` on the list; the time that stands there. Of two changes at once neither is lost.
fn add(path: &Path, name: &str) -> Result<u64> {
    let file = path.join(FILE);
    let _lock = lock(&path.join(LOCK))?;
    let mut list = read(&file)?;
    list.retain(|(known, _)| known != name);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    list.push((name.to_owned(), now.as_secs()));
    let text: String = list.iter().map(|(name, at)| format!("{name} {at}\n")).collect();
    // Whole at every moment: servers read it.
    let new = path.join(format!("{FILE}.new"));
    let written =
        fs::File::create(&new).and_then(|mut f| f.write_all(text.as_bytes()).and_then(|()| f.sync_data()));
    let written = written.and_then(|()| fs::rename(&new, &file));
    written.map_err(|e| Error::io(format!("credentials: {}", file.display()), e))?;
    Ok(now.as_secs())
}

/// Locked until it is dropped.
fn lock(file: &Path) -> Result<fs::File> {
    let failed = |e| Error::io(format!("credentials: {}", file.display()), e);
    let lock = fs::File::create(file).map_err(failed)?;
    let until = Instant::now() + LOCK_TIME;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::Error(e)) => return Err(failed(e)),
            Err(TryLockError::WouldBlock) if Instant::now() < until => {
                // Nothing tells when it goes.
                std::thread::park_timeout(Duration::from_millis(5));
            }
            Err(TryLockError::WouldBlock) => {
                let text = format!(
                    "credentials: another process has been changing the list of revoked certificates for {LOCK_TIME:?} ({} is locked): end it",
                    file.display()
                );
                return Err(Error::new(ErrorKind::Conflict, text));
            }
        }
    }
}

fn read(file: &Path) -> Result<List> {
    let wrong = |why: String| Error::invalid(format!("credentials: {}: {why}", file.display()));
    match fs::metadata(file) {
        Err(e) if e.kind() == IoKind::NotFound => return Ok(List::new()),
        Err(e) => return Err(wrong(e.to_string())),
        Ok(found) if found.len() > MOST => return Err(wrong(format!("it is longer than {MOST} bytes"))),
        Ok(_) => {}
    }
    let text = fs::read_to_string(file).map_err(|e| wrong(e.to_string()))?;
    let line = |line: &str| {
        let (name, at) = line.split_once(' ')?;
        check_name(name).ok()?;
        Some((name.to_owned(), at.trim().parse().ok()?))
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines
        .map(|text| line(text).ok_or_else(|| wrong(format!("'{text}' is not a name and a time in seconds"))))
        .collect()
}

/// The list of one folder.
pub(crate) struct Revoked {
    file: PathBuf,
    job: String,
    trust: Trust,
    read: Mutex<Option<(Stamp, Arc<List>)>>,
}

impl fmt::Debug for Revoked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Revoked")
            .field("file", &self.file)
            .finish_non_exhaustive()
    }
}

impl Revoked {
    pub(crate) fn new(credentials: &Credentials, trust: &Trust) -> Arc<Self> {
        Arc::new(Self {
            file: credentials.folder().join(FILE),
            job: credentials.job().to_owned(),
            trust: trust.clone(),
            read: Mutex::new(None),
        })
    }

    fn list(&self) -> Result<Arc<List>> {
        use std::os::unix::fs::MetadataExt as _;
        let mut last = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let stamp = match fs::metadata(&self.file) {
            Ok(found) => (found.modified().unwrap_or(UNIX_EPOCH), found.ino(), found.len()),
            // `read` says what it is.
            Err(_) => return read(&self.file).map(Arc::new),
        };
        if let Some((_, list)) = last.as_ref().filter(|(of, _)| *of == stamp) {
            return Ok(Arc::clone(list));
        }
        let list = Arc::new(read(&self.file)?);
        *last = Some((stamp, Arc::clone(&list)));
        Ok(list)
    }

    /// Checks that `certificate`, which was checked against the CA, was not taken back. Errors: what to tell.
    pub(crate) fn check(&self, certificate: &CertificateDer<'_>) -> std::result::Result<(), String> {
        let Ok(peer) = owner(Some(std::slice::from_ref(certificate)), &self.job) else {
            // Refused for that, by those who look at it.
            return Ok(());
        };
        let Role::Replica(name) = peer.role else {
            return Ok(());
        };
        let list = self.list().map_err(|e| e.message().to_owned())?;
        let taken_back = list.iter().filter(|(known, _)| *known == name).any(|(_, at)| {
            // A certificate says from when it is valid: so much earlier than it was made.
            let at = UNIX_EPOCH + Duration::from_secs(*at);
            self.trust.check(certificate, &self.job, at - EARLIER).is_ok()
        });
        match taken_back {
            true => Err(format!("the certificate of replica '{name}' was taken back")),
            false => Ok(()),
        }
    }

    /// What servers check their callers with.
    pub(crate) fn of_clients(self: &Arc<Self>) -> Arc<dyn ClientCertVerifier> {
        Arc::new(Unrevoked {
            inner: Arc::clone(&self.trust.of_clients),
            revoked: Arc::clone(self),
        })
    }
}

/// Callers whose certificate is the job's, and was not taken back.
#[derive(Debug)]
struct Unrevoked {
    inner: Arc<dyn ClientCertVerifier>,
    revoked: Arc<Revoked>,
}

impl ClientCertVerifier for Unrevoked {
    fn offer_client_auth(&self) -> bool {
        self.inner.offer_client_auth()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.inner.client_auth_mandatory()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> std::result::Result<ClientCertVerified, rustls::Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        match self.revoked.check(end_entity) {
            Ok(()) => Ok(verified),
            Err(why) => {
                tracing::debug!("{why}");
                Err(rustls::Error::InvalidCertificate(CertificateError::Revoked))
            }
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        self.inner.requires_raw_public_keys()
    }
}
