//! The hosts of a job, and what connects them.
//!
//! Three limits meet on a message: what its host sends, what the pair of hosts carries, and what the other host takes in. Ranks of one host
//! share memory instead. Ranks are numbered host by host.

use std::collections::BTreeMap;

use ftcore::{Error, ErrorKind, Result};
use serde::Deserialize;

use crate::units::{Rate, Seconds};

/// What of a line's rate is left for payload: Ethernet frames of 1,514 bytes carry 1,448 of a TCP stream.
pub(crate) const PAYLOAD: f64 = 1448.0 / 1514.0;
/// The payload of a TCP segment, in bits.
const SEGMENT_BITS: f64 = 1448.0 * 8.0;
/// More ranks than any machine has: a slip of the pen.
const MAX_RANKS: u64 = 4_000_000;

/// What connects two places, one way.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bits per second on the line.
    pub rate: Rate,
    /// How long a bit is on its way.
    #[serde(default)]
    pub delay: Seconds,
    /// The share of packets that are lost, 0 to 0.5.
    #[serde(default)]
    pub loss: f64,
}

impl Link {
    /// A link that loses nothing.
    pub fn new(rate: Rate, delay: Seconds) -> Self {
        Self {
            rate,
            delay,
            loss: 0.0,
        }
    }

    /// The payload that so many connections carry. Under loss each has what Reno reaches: segment / round trip · √(3 / 2p).
    pub(crate) fn payload(&self, connections: u32) -> Rate {
        let line = self.rate.part(PAYLOAD);
        let round_trip = 2.0 * self.delay.get();
        if self.loss <= 0.0 || round_trip <= 0.0 {
            return line;
        }
        let each = SEGMENT_BITS / round_trip * (1.5 / self.loss).sqrt();
        Rate::new(each * f64::from(connections.max(1))).map_or(line, |r| r.min(line))
    }

    fn check(&self, what: &str) -> Result<()> {
        if (0.0..=0.5).contains(&self.loss) {
            return Ok(());
        }
        let text = format!(
            "{what}: a loss of {}; write the share of packets lost, 0 to 0.5",
            self.loss
        );
        Err(Error::invalid(text))
    }
}

/// A machine.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// What it is called.
    pub name: String,
    /// How many ranks run on it.
    pub ranks: u32,
    /// What it sends and takes in at most, all its ranks together; `None`: as the links between hosts.
    pub rate: Option<Rate>,
    /// Hosts of one site are near each other.
    pub site: Option<String>,
}

/// All hosts and links of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Links {
    hosts: Vec<Host>,
    /// By host: its first rank. One more at the end.
    first: Vec<u32>,
    local: Link,
    between: Link,
    between_sites: Option<Link>,
    pairs: BTreeMap<(usize, usize), Link>,
    connections: u32,
}

impl Links {
    /// `hosts` machines of `ranks` ranks, which all reach each other over equal links.
    ///
    /// Errors: `InvalidArgument` without hosts or ranks, or for a loss that is none.
    pub fn uniform(hosts: u32, ranks: u32, local: Link, between: Link) -> Result<Self> {
        let host = |i: u32| Host {
            name: format!("host{i}"),
            ranks,
            rate: None,
            site: None,
        };
        let all = (0..hosts).map(host).collect();
        Self::new(all, local, between, None, 1)
    }

    fn new(
        hosts: Vec<Host>,
        local: Link,
        between: Link,
        between_sites: Option<Link>,
        connections: u32,
    ) -> Result<Self> {
        if hosts.is_empty() {
            return Err(Error::invalid(
                "there are no hosts: name at least one, with its ranks",
            ));
        }
        let mut first = vec![0u32];
        let mut total = 0u64;
        for host in &hosts {
            if host.ranks == 0 {
                return Err(Error::invalid(format!(
                    "host {} has no ranks; give it one or more",
                    host.name
                )));
            }
            total += u64::from(host.ranks);
            if total > MAX_RANKS {
                return Err(Error::invalid(format!("more than {MAX_RANKS} ranks in all")));
            }
            first.push(u32::try_from(total).unwrap_or(u32::MAX));
        }
        if !(1..=16).contains(&connections) {
            return Err(Error::invalid(format!(
                "{connections} connections; gloo has 1 to 16"
            )));
        }
        local.check("local")?;
        between.check("between")?;
        between_sites
            .iter()
            .try_for_each(|link| link.check("between_sites"))?;
        Ok(Self {
            hosts,
            first,
            local,
            between,
            between_sites,
            pairs: BTreeMap::new(),
            connections,
        })
    }

    /// Reads what `docs/plan.md` describes. Errors: `InvalidArgument` saying what is wrong, and where.
    pub fn from_json(text: &str) -> Result<Self> {
        let file: File = serde_json::from_str(text)
            .map_err(|e| Error::invalid(format!("the links: {e}; docs/plan.md has an example")))?;
        let mut hosts = Vec::new();
        let mut names = BTreeMap::new();
        for entry in file.hosts {
            for i in 0..entry.count.unwrap_or(1) {
                let name = match entry.count {
                    Some(_) => format!("{}{i}", entry.name),
                    None => entry.name.clone(),
                };
                if names.insert(name.clone(), hosts.len()).is_some() {
                    return Err(Error::invalid(format!(
                        "two hosts are called {name}; give each a name of its own"
                    )));
                }
                hosts.push(Host {
                    name,
                    ranks: entry.ranks,
                    rate: entry.rate,
                    site: entry.site.clone(),
                });
                if hosts.len() as u64 > MAX_RANKS {
                    return Err(Error::invalid(format!("more than {MAX_RANKS} hosts")));
                }
            }
        }
        let mut links = Self::new(
            hosts,
            file.local,
            file.between,
            file.between_sites,
            file.connections,
        )?;
        for pair in file.links {
            let find = |name: &str| {
                let at = names.get(name).copied();
                at.ok_or_else(|| {
                    Error::new(
                        ErrorKind::InvalidArgument,
                        format!("a link names {name}, which is no host"),
                    )
                })
            };
            let (from, to) = (find(&pair.from)?, find(&pair.to)?);
            let link = Link {
                rate: pair.rate,
                delay: pair.delay,
                loss: pair.loss,
            };
            link.check(&format!("the link from {} to {}", pair.from, pair.to))?;
            links.pairs.insert((from, to), link);
            // A link that is written once holds both ways.
            links.pairs.entry((to, from)).or_insert(link);
        }
        Ok(links)
    }

    /// The same with every rate between hosts so many times as large. Errors: `InvalidArgument` unless that makes rates.
    pub fn scaled(&self, by: f64) -> Result<Self> {
        let times = |rate: Rate| Rate::new(rate.bits_per_second() * by);
        let link = |link: Link| times(link.rate).map(|rate| Link { rate, ..link });
        let mut scaled = self.clone();
        scaled.between = link(self.between)?;
        scaled.between_sites = self.between_sites.map(link).transpose()?;
        for host in &mut scaled.hosts {
            host.rate = host.rate.map(times).transpose()?;
        }
        for pair in scaled.pairs.values_mut() {
            *pair = link(*pair)?;
        }
        Ok(scaled)
    }

    /// All hosts, in order.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.first.last().copied().unwrap_or(0)
    }

    /// The host of a rank; the last one for a rank that is not there.
    pub fn host_of(&self, rank: u32) -> usize {
        let behind = self.first.partition_point(|first| *first <= rank);
        behind.saturating_sub(1).min(self.hosts.len().saturating_sub(1))
    }

    /// The connections between two ranks of different hosts.
    pub(crate) fn connections(&self) -> u32 {
        self.connections
    }

    /// Memory that ranks of one host share.
    pub fn local(&self) -> Link {
        self.local
    }

    /// What connects two hosts, one way.
    pub fn between(&self, from: usize, to: usize) -> Link {
        if let Some(link) = self.pairs.get(&(from, to)) {
            return *link;
        }
        let site = |host: usize| self.hosts.get(host).and_then(|h| h.site.as_deref());
        match self.between_sites {
            Some(far) if site(from) != site(to) => far,
            _ => self.between,
        }
    }

    /// What a host sends, or takes in, as payload.
    pub(crate) fn of_host(&self, host: usize) -> Rate {
        let own = self.hosts.get(host).and_then(|h| h.rate);
        own.unwrap_or(self.between.rate).part(PAYLOAD)
    }

    /// What a pair of hosts carries as payload.
    pub(crate) fn of_pair(&self, from: usize, to: usize) -> Rate {
        self.between(from, to).payload(self.connections)
    }

    /// What the slowest host and the slowest pair of hosts leave, as payload: between any two hosts it is at least that.
    pub(crate) fn slowest(&self) -> Rate {
        let of_hosts = (0..self.hosts.len()).map(|host| self.of_host(host));
        let named = self.pairs.keys().filter(|(from, to)| from != to);
        let of_named = named.clone().map(|&(from, to)| self.of_pair(from, to));
        // Of the pairs without a link of their own, which are too many to go through: those of one site, and those of two.
        let mut at_sites: BTreeMap<Option<&str>, usize> = BTreeMap::new();
        for host in &self.hosts {
            let site = self.between_sites.and(host.site.as_deref());
            *at_sites.entry(site).or_default() += 1;
        }
        let pairs_of = |hosts: usize| hosts * (hosts - 1);
        let near: usize = at_sites.values().copied().map(pairs_of).sum();
        let far = pairs_of(self.hosts.len()) - near;
        let site = |host: usize| self.hosts.get(host).and_then(|h| h.site.as_deref());
        let is_near = |(from, to): &(usize, usize)| self.between_sites.is_none() || site(*from) == site(*to);
        let named_near = named.clone().filter(|pair| is_near(pair)).count();
        let others = [
            (near > named_near).then_some(self.between),
            self.between_sites.filter(|_| far > named.count() - named_near),
        ];
        let of_others = others.iter().flatten().map(|link| link.payload(self.connections));
        let rates = of_hosts.chain(of_named).chain(of_others);
        rates
            .reduce(Rate::min)
            .unwrap_or_else(|| self.between.payload(self.connections))
    }

    /// True if no host and no pair of these differs from another one in what concerns time.
    pub(crate) fn is_uniform(&self, hosts: &[usize]) -> bool {
        let site = |h: &Host| self.between_sites.and_then(|_| h.site.clone());
        let of = |host: &usize| self.hosts.get(*host).map(|h| (h.rate, site(h)));
        let all_alike = hosts
            .windows(2)
            .all(|w| w.first().and_then(of) == w.last().and_then(of));
        let named = |pair: &(usize, usize)| hosts.contains(&pair.0) && hosts.contains(&pair.1);
        all_alike && !self.pairs.keys().any(named)
    }

    /// The names of the sites, in order, with their hosts; hosts without one are left out.
    pub(crate) fn sites(&self) -> Vec<(&str, Vec<usize>)> {
        let mut sites: Vec<(&str, Vec<usize>)> = Vec::new();
        for (i, host) in self.hosts.iter().enumerate() {
            let Some(name) = host.site.as_deref() else {
                continue;
            };
            match sites.iter_mut().find(|(site, _)| *site == name) {
                Some((_, of)) => of.push(i),
                None => sites.push((name, vec![i])),
            }
        }
        sites
    }
}

/// As written in a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    hosts: Vec<HostEntry>,
    local: Link,
    between: Link,
    between_sites: Option<Link>,
    #[serde(default)]
    links: Vec<PairEntry>,
    #[serde(default = "one")]
    connections: u32,
}

fn one() -> u32 {
    1
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostEntry {
    name: String,
    #[serde(default = "one")]
    ranks: u32,
    /// So many equal hosts, NAME0, NAME1 and so on.
    count: Option<u32>,
    rate: Option<Rate>,
    site: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PairEntry {
    from: String,
    to: String,
    rate: Rate,
    #[serde(default)]
    delay: Seconds,
    #[serde(default)]
    loss: f64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const TWO_SITES: &str = r#"{
        "hosts": [{"name": "a", "ranks": 8, "count": 2, "site": "north", "rate": "25gbit"}, {"name": "c", "ranks": 4, "site": "south"}],
        "local": {"rate": "400gbit", "delay": "2us"},
        "between": {"rate": "10gbit", "delay": "50us"},
        "between_sites": {"rate": "1gbit", "delay": "20ms"},
        "links": [{"from": "a1", "to": "c", "rate": "200mbit", "delay": "30ms", "loss": 0.001}]
    }"#;

    #[test]
    fn a_file_names_hosts_sites_and_single_links() {
        let links = Links::from_json(TWO_SITES).unwrap();
        assert_eq!((links.world(), links.hosts().len()), (20, 3));
        assert_eq!((links.host_of(0), links.host_of(8), links.host_of(19)), (0, 1, 2));
        assert_eq!(links.between(0, 1).rate.to_string(), "10.0 Gbit/s");
        assert_eq!(links.between(0, 2).delay.to_string(), "20.0 ms");
        assert_eq!(links.between(2, 1).rate.to_string(), "200 Mbit/s");
        assert!(links.is_uniform(&[0, 1]) && !links.is_uniform(&[0, 1, 2]));
        assert_eq!(links.sites().len(), 2);
        // 1,448 bytes each 60 ms, times 38.7.
        let under_loss = links.of_pair(1, 2).bits_per_second();
        assert!((7.4e6..7.6e6).contains(&under_loss), "{under_loss}");
    }

    #[test]
    fn the_slowest_way_is_that_of_the_slowest_host_or_pair() {
        let mbits = |text: &str| {
            let links = Links::from_json(text).unwrap();
            (links.slowest().bits_per_second() / PAYLOAD / 1e6).round()
        };
        // The rate under loss, as above; without loss the rate of the link; without the link that between sites.
        assert_eq!(mbits(TWO_SITES), 8.0);
        let clean = TWO_SITES.replace(", \"loss\": 0.001", "");
        assert_eq!(mbits(&clean), 200.0);
        assert_eq!(mbits(&clean.replace("200mbit", "20gbit")), 1000.0);
        // The first host's own, however fast the others are.
        let own = |rate: &str| clean.replace("\"25gbit\"", rate).replace("200mbit", "20gbit");
        assert_eq!(mbits(&own("\"300mbit\"")), 300.0);
        // Links within sites count only where a site has two hosts.
        let slow_within = own("\"25gbit\"").replace("\"10gbit\"", "\"50mbit\"");
        let alone = slow_within
            .replace("\"count\": 2, ", "")
            .replace("\"a\"", "\"a1\"")
            .replace("\"ranks\": 4,", "\"ranks\": 4, \"rate\": \"25gbit\",");
        assert_eq!((mbits(&slow_within), mbits(&alone)), (50.0, 20_000.0));
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        for (from, to, text) in [
            ("\"ranks\": 4", "\"ranks\": 0", "host c has no ranks"),
            ("\"to\": \"c\"", "\"to\": \"d\"", "names d"),
            ("0.001", "0.9", "loss of 0.9"),
            ("200mbit", "0", "positive"),
            ("\"name\": \"c\"", "\"name\": \"a0\"", "called a0"),
            ("\"hosts\"", "\"machines\"", "machines"),
        ] {
            let e = Links::from_json(&TWO_SITES.replacen(from, to, 1)).unwrap_err();
            assert!(e.message().contains(text), "{text}: {e}");
        }
    }
}
