//! What a group is told when it is made, and the constants that all ranks must have in common.

use std::sync::Arc;
use std::time::Duration;

use ftcore::{Credentials, Error, GroupOptions, Result};

use crate::schedule::layered::ONE_RAIL_MAX_BYTES;
use crate::schedule::uneven::SEGMENT_MIN_BYTES;
use crate::schedule::{BLOCK_BYTES, DIRECT_MAX_BYTES, DIRECT_MAX_WORLD, FLAT_MAX_WORLD, TREE_MAX_BYTES};
use crate::stripes;
use crate::transport::{interface, shm};
use crate::wire::{EAGER, INLINE, MAX_CONNECTIONS, SEGMENT, STRIPE, VERSION};

/// The options that are acted on; any other is refused (INV-9).
pub(crate) const HONOURED: &[&str] = &[
    "net_name",
    "hint:transport",
    "hint:connections",
    "hint:links",
    "hint:credentials",
    "hint:encrypt",
    "hint:host",
];

/// How pairs of ranks are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    /// Shared memory within a host, TCP between hosts.
    Auto,
    /// TCP between all pairs.
    Tcp,
    /// Shared memory between all pairs, or an error.
    Shm,
    /// Shared memory between ranks whose sum is even, TCP between the others: for tests on one host.
    Mixed,
}

impl std::str::FromStr for Transport {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "shm" => Ok(Self::Shm),
            _ => Err(Error::invalid(format!(
                "option transport is '{text}'; it can be auto, tcp or shm"
            ))),
        }
    }
}

/// What a group takes the links between its ranks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// All alike.
    Even,
    /// Each as it was measured when the ranks were connected.
    Measured,
}

impl Links {
    /// As the greeting says it.
    pub(crate) fn code(self) -> u32 {
        self as u32
    }

    /// As the option says it; `None` for a code that this build does not know.
    pub(crate) fn name(code: u32) -> Option<&'static str> {
        match code {
            0 => Some("even"),
            1 => Some("measured"),
            _ => None,
        }
    }
}

impl std::str::FromStr for Links {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text.trim().to_ascii_lowercase().as_str() {
            "even" => Ok(Self::Even),
            "measured" => Ok(Self::Measured),
            _ => Err(Error::invalid(format!(
                "option links is '{text}'; it can be even or measured"
            ))),
        }
    }
}

/// The options of a group, in the form in which they are used.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The time-out of calls that name no deadline.
    pub(crate) timeout: Duration,
    /// The interface or address to use.
    pub(crate) net_name: Option<String>,
    /// The name or address that other hosts are told.
    pub(crate) host: Option<String>,
    /// How pairs are connected.
    pub(crate) transport: Transport,
    /// How many connections carry a large payload between two ranks without common memory; the same on all ranks.
    pub(crate) connections: u32,
    /// What links are taken for; the same on all ranks.
    pub(crate) links: Links,
    /// Shares that a test gives, in the place of measured ones.
    pub(crate) shares: Vec<u32>,
    /// What ranks prove to each other: of the hint `credentials` (a folder), else of the environment.
    pub(crate) credentials: Option<Arc<Credentials>>,
    /// See [`constants`]; a field so that a test can make ranks disagree.
    pub(crate) constants: u64,
    /// True if ranks need prove nothing (`OXCCL_INSECURE`). Read with the rest when a group is made, not when it meets: by then a program may change
    /// its environment in other threads.
    pub(crate) insecure: bool,
}

impl Settings {
    /// Errors: `InvalidArgument` for an option that is not honoured, or a value that is not known.
    pub(crate) fn new(options: GroupOptions) -> Result<Self> {
        // Also for groups that no registry makes; once more changes nothing.
        let options = options.resolved("gloo", HONOURED)?.options;
        let transport = options.hints.get("transport");
        let transport = transport.map_or(Ok(Transport::Auto), |text| text.parse())?;
        let connections = options.hints.get("connections");
        let connections = connections.map_or(Ok(1), |text| self::connections(text))?;
        let links = options.hints.get("links");
        let links = links.map_or(Ok(Links::Even), |text| text.parse())?;
        let credentials = options.credentials()?;
        if let Some(name) = &options.net_name {
            // Before the other ranks wait for this one.
            interface::addresses(Some(name), None, true)?;
        }
        Ok(Self {
            transport,
            connections,
            links,
            shares: Vec::new(),
            credentials,
            timeout: options.timeout,
            net_name: options.net_name.clone(),
            host: options.hints.get("host").filter(|host| !host.is_empty()).cloned(),
            constants: constants(),
            insecure: ftcore::identity::is_insecure(false),
        })
    }
}

impl Settings {
    /// True if this rank may be reached from other hosts.
    pub(crate) fn is_open(&self) -> bool {
        self.credentials.is_some() || self.insecure
    }

    /// How many connections there are beside the first one between two ranks without common memory: with several, the first
    /// carries headers and short payloads only.
    pub(crate) fn rails(&self) -> u32 {
        if self.connections > 1 { self.connections } else { 0 }
    }
}

/// A number of connections, as text.
fn connections(text: &str) -> Result<u32> {
    let number = text.trim().parse().ok();
    number
        .filter(|n| (1..=MAX_CONNECTIONS).contains(n))
        .ok_or_else(|| {
            Error::invalid(format!(
                "option connections is '{text}'; it can be a number from 1 to {MAX_CONNECTIONS}"
            ))
        })
}

/// A hash of everything that decides about algorithms and frames: ranks compare it when they connect (INV-3).
pub(crate) fn constants() -> u64 {
    let parts = [
        u64::from(VERSION),
        DIRECT_MAX_BYTES as u64,
        u64::from(DIRECT_MAX_WORLD),
        u64::from(FLAT_MAX_WORLD),
        TREE_MAX_BYTES as u64,
        ONE_RAIL_MAX_BYTES as u64,
        SEGMENT as u64,
        INLINE as u64,
        EAGER as u64,
        STRIPE as u64,
        stripes::FROM as u64,
        BLOCK_BYTES as u64,
        SEGMENT_MIN_BYTES as u64,
        shm::CAPACITY as u64,
        // Payloads are in the machine's byte order.
        u64::from(u16::from_ne_bytes([1, 0])),
        size_of::<usize>() as u64,
    ];
    parts.iter().fold(0xCBF2_9CE4_8422_2325, |hash, part| {
        (hash ^ part).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_gloo_does_not_honour_is_refused_by_name() {
        let options = GroupOptions {
            min_ctas: Some(4),
            net_name: Some("lo".into()),
            ..Default::default()
        };
        let e = Settings::new(options.clone()).unwrap_err();
        assert!(e.to_string().contains("min_ctas"), "{e}");
        let lenient = GroupOptions {
            lenient: true,
            ..options
        };
        assert_eq!(Settings::new(lenient).unwrap().net_name.as_deref(), Some("lo"));
    }

    #[test]
    fn an_interface_that_is_not_here_is_refused_before_the_ranks_meet() {
        let with = |name: &str| {
            Settings::new(GroupOptions {
                net_name: Some(name.into()),
                ..Default::default()
            })
        };
        let e = with("eth77").unwrap_err();
        assert!(
            e.kind() == ftcore::ErrorKind::InvalidArgument && e.to_string().contains("'eth77'"),
            "{e}"
        );
        with("127.0.0.1").unwrap();
    }

    #[test]
    fn the_hint_decides_about_the_transport_and_an_unknown_one_is_refused() {
        let with = |value: &str| {
            let mut options = GroupOptions::default();
            options.hints.insert("transport".into(), value.into());
            Settings::new(options).map(|s| s.transport)
        };
        assert_eq!(with("TCP").unwrap(), Transport::Tcp);
        assert_eq!(with("shm").unwrap(), Transport::Shm);
        let e = with("mixed").unwrap_err();
        assert!(e.to_string().contains("auto, tcp or shm"), "{e}");
    }

    #[test]
    fn the_hint_decides_about_the_links_and_an_unknown_one_is_refused() {
        let with = |value: &str| {
            let mut options = GroupOptions::default();
            options.hints.insert("links".into(), value.into());
            Settings::new(options).map(|s| s.links)
        };
        assert_eq!(Settings::new(GroupOptions::default()).unwrap().links, Links::Even);
        for links in [Links::Even, Links::Measured] {
            assert_eq!(with(Links::name(links.code()).unwrap()).unwrap(), links);
        }
        let e = with("guessed").unwrap_err();
        assert!(e.to_string().contains("even or measured"), "{e}");
    }

    #[test]
    fn the_hint_decides_about_the_connections_and_a_number_out_of_range_is_refused() {
        let with = |value: &str| {
            let mut options = GroupOptions::default();
            options.hints.insert("connections".into(), value.into());
            Settings::new(options).map(|s| s.connections)
        };
        assert_eq!(Settings::new(GroupOptions::default()).unwrap().connections, 1);
        assert_eq!(with("4").unwrap(), 4);
        assert_eq!(with("16").unwrap(), MAX_CONNECTIONS);
        for bad in ["0", "17", "many", "-1", ""] {
            let e = with(bad).unwrap_err();
            assert!(e.to_string().contains("1 to 16"), "{e}");
        }
    }
}
