//! This process in one role: the certificate that it shows, and connections that it makes.

use std::future::poll_fn;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use ftcore::{Credentials, Error, ErrorKind, Result};
use rustls::client::Resumption;
use rustls::pki_types::ServerName;
use rustls::server::StoresServerSessions;
use rustls::version::TLS13;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncBufRead as _, AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::folder::{Folder, Pair};
use crate::revoked::Revoked;
use crate::trust::owner;
use crate::{Role, server_name};

/// This process as a member of a job.
#[derive(Debug)]
pub struct Party {
    job: String,
    /// Where its credentials are from, for messages.
    folder: PathBuf,
    role: Role,
    name: ServerName<'static>,
    client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
    revoked: Arc<Revoked>,
}

impl Party {
    /// The process with these credentials as `role`: with the certificate in the folder, or one that it issues itself with the CA's key.
    ///
    /// Errors: `InvalidArgument` if the folder allows another role only, or something in it is missing, malformed or expired.
    pub fn new(credentials: &Credentials, role: Role) -> Result<Arc<Self>> {
        let folder = Folder::open(credentials)?;
        let own = match &role {
            Role::Operator if folder.has("operator.pem") => folder.pair("operator")?.0,
            _ if folder.has("ca.key") => folder.issue(&role)?,
            _ if folder.has("member.pem") => {
                let (pair, found) = folder.pair("member")?;
                if found != role {
                    return Err(Error::invalid(format!(
                        "credentials: this process is {role} of job {}, and the certificate in {} is that of {found}; give it a folder of its \
                         own (`oxccl credentials issue`)",
                        credentials.job(),
                        credentials.folder().display()
                    )));
                }
                pair
            }
            _ => {
                return Err(Error::invalid(format!(
                    "credentials: {} has neither ca.key nor member.pem: a process with it cannot be {role}",
                    credentials.folder().display()
                )));
            }
        };
        Self::with(credentials, role, &folder, own)
    }

    /// The process with these credentials, which takes part in no step itself: the operator if the folder allows it, else the replica that it
    /// was made for. Errors: as of [`Party::new`].
    pub fn tool(credentials: &Credentials) -> Result<Arc<Self>> {
        let folder = Folder::open(credentials)?;
        if !folder.has("operator.pem") && !folder.has("ca.key") && folder.has("member.pem") {
            let (pair, role) = folder.pair("member")?;
            return Self::with(credentials, role, &folder, pair);
        }
        Self::new(credentials, Role::Operator)
    }

    fn with(credentials: &Credentials, role: Role, folder: &Folder, own: Pair) -> Result<Arc<Self>> {
        let job = credentials.job().to_owned();
        let failed = |e: rustls::Error| {
            Error::invalid(format!("credentials: {}: {e}", credentials.folder().display())).with_source(e)
        };
        let trust = &folder.trust;
        let revoked = Revoked::new(credentials, trust);
        let key = own.key.clone_key();
        let mut client = ClientConfig::builder_with_provider(Arc::clone(&trust.provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?
            .with_root_certificates(Arc::clone(&trust.roots))
            .with_client_auth_cert(vec![own.certificate.clone()], key)
            .map_err(failed)?;
        client.resumption = Resumption::disabled();
        let mut server = ServerConfig::builder_with_provider(Arc::clone(&trust.provider))
            .with_protocol_versions(&[&TLS13])
            .map_err(failed)?
            .with_client_cert_verifier(revoked.of_clients())
            .with_single_cert(vec![own.certificate], own.key)
            .map_err(failed)?;
        // One ticket, which cannot be used again: see `Forgetful`.
        server.session_storage = Arc::new(Forgetful);
        server.send_tls13_tickets = 1;
        // For callers that ask; ours know what they speak.
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let name = ServerName::try_from(server_name(&job))
            .map_err(|e| Error::invalid(format!("job id {job}: {e}")))?;
        Ok(Arc::new(Self {
            job,
            folder: credentials.folder().to_owned(),
            role,
            name,
            client: Arc::new(client),
            server: Arc::new(server),
            revoked,
        }))
    }

    /// The job's id.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// What this process is.
    pub fn role(&self) -> &Role {
        &self.role
    }

    /// Proves over `stream` who this process is, and has the other side prove that it is `expected`, or any member of the job if that is `None`.
    /// Returns once the other side has accepted the proof, so that a refusal is seen here and not by the first request. Without a deadline of
    /// its own.
    ///
    /// Errors: `Unavailable` that says which side lacks what, with a [`Refusal`] as its source where another try with the same credentials would end
    /// alike. What the other side is or does is never this process's own wrong argument.
    pub async fn connect<S>(&self, stream: S, expected: Option<&Role>) -> Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let refused = |e: &io::Error| self.explained(e);
        let connector = TlsConnector::from(Arc::clone(&self.client));
        let mut stream = connector
            .connect(self.name.clone(), stream)
            .await
            .map_err(|e| refused(&e))?;
        let peer = owner(stream.get_ref().1.peer_certificates(), &self.job)
            .map_err(|why| refusal(format!("the server is none of job {}: {why}", self.job)))?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        if let Some(Err(why)) = shown.map(|certificate| self.revoked.check(certificate)) {
            return Err(refusal(format!(
                "the server is none of job {} any more: {why}",
                self.job
            )));
        }
        if let Some(expected) = expected.filter(|e| **e != peer.role) {
            return Err(refusal(format!(
                "the server proves to be {peer}, and {expected} was called"
            )));
        }
        // The server's ticket follows its judgement of our certificate.
        poll_fn(|cx| {
            let read = Pin::new(&mut stream).poll_fill_buf(cx).map_ok(<[u8]>::is_empty);
            match read {
                Poll::Pending if stream.get_ref().1.tls13_tickets_received() > 0 => Poll::Ready(Ok(())),
                Poll::Pending => Poll::Pending,
                Poll::Ready(Ok(true)) => Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                Poll::Ready(read) => Poll::Ready(read.map(drop)),
            }
        })
        .await
        .map_err(|e| refused(&e))?;
        Ok(stream)
    }

    /// What a failed handshake means.
    fn explained(&self, error: &io::Error) -> Error {
        let (job, own, folder) = (&self.job, &self.role, self.folder.display());
        let cause = error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>());
        match cause {
            Some(rustls::Error::AlertReceived(alert)) => refusal(format!(
                "the server refuses the credentials of this process, {own} of job {job} with those in {folder} ({alert:?}): does it have those of the \
                 same job?"
            )),
            Some(rustls::Error::InvalidCertificate(why)) => refusal(format!(
                "the server's certificate is not of job {job}, whose credentials this process has from {folder} ({why:?}): the server or that folder is of another job"
            )),
            Some(rustls::Error::InvalidMessage(_)) => refusal(format!(
                "the server does not speak TLS: it runs without credentials, and this process has those of job {job} in {folder}"
            )),
            Some(other) => unavailable(format!(
                "the server did not prove that it is of job {job}: {other}"
            )),
            None if error.kind() == io::ErrorKind::UnexpectedEof => unavailable(format!(
                "the server closed the connection while both were to prove that they are of job {job}: does it have credentials?"
            )),
            None => unavailable(format!(
                "while both were to prove that they are of job {job}: {error}"
            )),
        }
    }
}

/// The source of an error of [`Party::connect`] that another try would not cure: the other side is there, and one of the two is not whom the other
/// expects.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

impl Refusal {
    /// True if it is among the sources of `error`, or `error` itself.
    pub fn is_in(error: &(dyn std::error::Error + 'static)) -> bool {
        error.is::<Self>() || error.source().is_some_and(Self::is_in)
    }
}

fn refusal(text: String) -> Error {
    unavailable(text.clone()).with_source(Refusal(text))
}

fn unavailable(text: String) -> Error {
    Error::new(ErrorKind::Unavailable, text)
}

/// Keeps no session, so that every connection proves all anew (a certificate may have expired since), and says that it does, so that a ticket
/// is sent: it tells the caller that its certificate was accepted.
#[derive(Debug)]
struct Forgetful;

impl StoresServerSessions for Forgetful {
    fn put(&self, _: Vec<u8>, _: Vec<u8>) -> bool {
        true
    }

    fn get(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn take(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn can_cache(&self) -> bool {
        true
    }
}
