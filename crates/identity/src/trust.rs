//! The job's CA as the judge of certificates, and what a certificate says of its owner.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, crypto};

use crate::{Peer, Role, server_name};

/// A job's CA.
#[derive(Debug, Clone)]
pub(crate) struct Trust {
    pub(crate) provider: Arc<CryptoProvider>,
    pub(crate) roots: Arc<RootCertStore>,
    pub(crate) of_clients: Arc<dyn ClientCertVerifier>,
    of_servers: Arc<WebPkiServerVerifier>,
}

impl Trust {
    /// Trust in what `ca` signs, and nothing else. Errors: what is wrong with it.
    pub(crate) fn new(ca: CertificateDer<'static>) -> Result<Self, String> {
        let provider = Arc::new(crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        roots.add(ca).map_err(|e| e.to_string())?;
        let roots = Arc::new(roots);
        let of_clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|e| e.to_string())?;
        let of_servers =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(|e| e.to_string())?;
        Ok(Self {
            provider,
            roots,
            of_clients,
            of_servers,
        })
    }

    /// Checks that a member of `job` accepts `certificate` at `time`, at both ends of a connection.
    pub(crate) fn check(
        &self,
        certificate: &CertificateDer<'_>,
        job: &str,
        time: SystemTime,
    ) -> Result<(), String> {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = UnixTime::since_unix_epoch(since);
        self.of_clients
            .verify_client_cert(certificate, &[], now)
            .map_err(|e| e.to_string())?;
        let name = ServerName::try_from(server_name(job)).map_err(|e| e.to_string())?;
        self.of_servers
            .verify_server_cert(certificate, &[], &name, &[], now)
            .map(drop)
            .map_err(|e| e.to_string())
    }

    /// The last day on which `certificate` is accepted; `None` if it is not accepted now.
    pub(crate) fn accepted_until(&self, certificate: &CertificateDer<'_>, job: &str) -> Option<SystemTime> {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        let now = SystemTime::now();
        self.check(certificate, job, now).ok()?;
        // Between a day on which it is and one on which it is not.
        let (mut good, mut bad) = (0_u32, 200 * 366);
        while good + 1 < bad {
            let middle = good.midpoint(bad);
            match self.check(certificate, job, now + DAY * middle) {
                Ok(()) => good = middle,
                Err(_) => bad = middle,
            }
        }
        Some(now + DAY * good)
    }
}

/// Whom a certificate of `job` was made out to. Errors: a text that says what it lacks. Its signature is not looked at here.
pub(crate) fn owner(certificates: Option<&[CertificateDer<'_>]>, job: &str) -> Result<Peer, String> {
    let first = certificates
        .and_then(<[_]>::first)
        .ok_or("it shows no certificate")?;
    let parsed = webpki::EndEntityCert::try_from(first).map_err(|e| format!("its certificate: {e}"))?;
    let mut roles = parsed.valid_uri_names().filter_map(|uri| Role::of_uri(uri, job));
    match (roles.next(), roles.next()) {
        (Some(role), None) => Ok(Peer {
            job: job.to_owned(),
            role,
        }),
        (None, _) => Err(format!("its certificate names no role in job {job}")),
        (Some(_), Some(_)) => Err("its certificate names several roles".into()),
    }
}
