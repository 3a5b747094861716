//! Connections that others make: nothing of one is read before it is known who is at the other end.
//!
//! What a stranger can take is bounded. It has until the deadline; and of all connections whose handshake goes on, the oldest ends when there
//! are too many. A member's takes a moment, so it is not the oldest.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustls::{CertificateError, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::trust::owner;
use crate::{Party, Peer, server_name};
use ftcore::identity::Rarely;

/// Takes connections for the jobs that this process is a server of.
#[derive(Debug)]
pub struct Acceptor {
    /// The first one is for callers that do not say which job they mean.
    jobs: Vec<(String, Arc<ServerConfig>)>,
    by_server_name: HashMap<String, usize>,
    handshakes: Mutex<Handshakes>,
    refusals: Rarely,
}

#[derive(Debug)]
struct Handshakes {
    most: usize,
    next: u64,
    going: BTreeMap<u64, Arc<Notify>>,
}

/// One handshake among the others, until it is dropped.
struct Going<'a> {
    acceptor: &'a Acceptor,
    number: u64,
    end: Arc<Notify>,
}

impl Drop for Going<'_> {
    fn drop(&mut self) {
        self.acceptor.handshakes().going.remove(&self.number);
    }
}

impl Acceptor {
    /// For the jobs of `parties`, which are not empty and of different jobs; with at most `handshakes` of strangers at once.
    pub fn new(parties: &[Arc<Party>], handshakes: usize) -> Self {
        let jobs: Vec<_> = parties
            .iter()
            .map(|p| (p.job().to_owned(), Arc::clone(&p.server)))
            .collect();
        let by_server_name = jobs
            .iter()
            .enumerate()
            .map(|(i, (job, _))| (server_name(job), i))
            .collect();
        Self {
            jobs,
            by_server_name,
            handshakes: Mutex::new(Handshakes {
                most: handshakes.max(1),
                next: 0,
                going: BTreeMap::new(),
            }),
            refusals: Rarely::default(),
        }
    }

    fn handshakes(&self) -> MutexGuard<'_, Handshakes> {
        self.handshakes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self) -> Going<'_> {
        let mut handshakes = self.handshakes();
        if handshakes.going.len() >= handshakes.most
            && let Some((_, oldest)) = handshakes.going.pop_first()
        {
            oldest.notify_one();
        }
        let (number, end) = (handshakes.next, Arc::<Notify>::default());
        handshakes.next += 1;
        handshakes.going.insert(number, Arc::clone(&end));
        Going {
            acceptor: self,
            number,
            end,
        }
    }

    /// Has `stream`, wrapped by `wrap`, prove whose it is before `deadline`. `None` if it did not: the log says why, once a second at most,
    /// and the caller hears it where it can understand it.
    pub async fn accept<S>(
        &self,
        stream: TcpStream,
        address: SocketAddr,
        deadline: Instant,
        wrap: impl FnOnce(TcpStream) -> S,
    ) -> Option<(TlsStream<S>, Peer)>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let going = self.begin();
        let why = tokio::select! {
            proved = self.handshake(stream, wrap) => match proved {
                Ok(proved) => return Some(proved),
                Err(why) => why,
            },
            () = tokio::time::sleep_until(deadline.into()) => "it did not prove in time who it is".to_owned(),
            () = going.end.notified() => "others came, and it had not proved who it is".to_owned(),
        };
        if why == SILENT {
            tracing::debug!(peer = %address, "a connection ended: {why}");
        } else if let Some(not_logged) = self.refusals.pass() {
            tracing::warn!(peer = %address, not_logged, "a connection is refused: {why}");
        }
        None
    }

    async fn handshake<S>(
        &self,
        stream: TcpStream,
        wrap: impl FnOnce(TcpStream) -> S,
    ) -> Result<(TlsStream<S>, Peer), String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let mut first = [0; 4];
        let n = stream.peek(&mut first).await.map_err(|e| e.to_string())?;
        let first = first.get(..n).unwrap_or_default();
        if first.is_empty() {
            return Err(SILENT.into());
        }
        if !first.starts_with(&[RECORD]) {
            let text = self.lacking();
            // It need not listen.
            let _ = tokio::time::timeout(TELLING, tell(stream, &plain(first, &text))).await;
            return Err(format!("it does not speak TLS; {text}"));
        }
        let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), wrap(stream))
            .await
            .map_err(|e| explained(&e))?;
        let asked = hello.client_hello().server_name().map(str::to_owned);
        let index = asked
            .as_ref()
            .and_then(|name| self.by_server_name.get(name))
            .copied();
        // One that means another job learns from our certificate that it is wrong here.
        let (job, config) = self
            .jobs
            .get(index.unwrap_or(0))
            .ok_or("this server has no job")?;
        let stream = hello.into_stream(Arc::clone(config)).await.map_err(|e| {
            let meant = match (&asked, index) {
                (Some(name), None) => format!(" (it means {:?})", shortened(name)),
                _ => String::new(),
            };
            format!("{}{meant}", explained(&e))
        })?;
        let peer = owner(stream.get_ref().1.peer_certificates(), job)?;
        Ok((stream, peer))
    }

    fn lacking(&self) -> String {
        let jobs: Vec<&str> = self.jobs.iter().take(16).map(|(job, _)| job.as_str()).collect();
        format!(
            "this server asks for the credentials of {} (OXCCL_CREDENTIALS, https://)",
            match jobs.as_slice() {
                [one] => format!("job {one}"),
                several => format!("one of the jobs {}", several.join(", ")),
            }
        )
    }
}

/// Of one that only looked whether something listens here.
const SILENT: &str = "it closed the connection without a word";

/// The type of TLS's first record.
const RECORD: u8 = 0x16;

fn shortened(text: &str) -> String {
    text.chars().take(128).collect()
}

/// How long a caller without TLS may take to hear what it lacks.
const TELLING: Duration = Duration::from_secs(1);
/// What is read of it meanwhile, in bytes.
const LISTENING: u64 = 64 * 1024;

/// Sends `bytes`, and reads what comes until the caller has closed: to close before would take the answer away from it.
async fn tell(mut stream: TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(LISTENING), &mut tokio::io::sink())
        .await
        .map(drop)
}

/// `text` for a caller without TLS that began with `first`: HTTP/2 as the reason of a GOAWAY, else HTTP/1.
fn plain(first: &[u8], text: &str) -> Vec<u8> {
    if b"PRI ".starts_with(first) {
        // SETTINGS; GOAWAY with last stream 0, INADEQUATE_SECURITY, and the text.
        let length = u32::try_from(text.len() + 8).unwrap_or(8).to_be_bytes();
        let [_, length @ ..] = length;
        let mut bytes = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
        bytes.extend(length);
        bytes.extend([7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x0c]);
        bytes.extend(text.bytes());
        return bytes;
    }
    format!(
        "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{text}\n",
        text.len() + 1
    )
    .into_bytes()
}

/// What the peer's failure to prove itself means.
fn explained(error: &io::Error) -> String {
    match error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::NoCertificatesPresented) => "it shows no certificate".into(),
        Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "its certificate is not of this job".into()
        }
        Some(rustls::Error::InvalidCertificate(CertificateError::Revoked)) => {
            "its certificate was taken back (`oxccl credentials revoke`), or the list of those that were cannot be read".into()
        }
        Some(rustls::Error::InvalidCertificate(why)) => format!("its certificate is not valid: {why:?}"),
        Some(rustls::Error::AlertReceived(alert)) => {
            format!("it does not accept this server's certificate ({alert:?}): it is of another job")
        }
        Some(other) => format!("it did not prove who it is: {other}"),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "it closed the connection before it proved who it is".into()
        }
        None => error.to_string(),
    }
}
