//! Slow links between network namespaces of this machine: a switch with limited ports, or a long line.
//!
//! A namespace is that of a process which only sleeps ([`Host`]); the kernel ends such a process with the thread that
//! made it, and a namespace with its last process, so nothing is left behind however a test ends. Everything inside is set up
//! with `ip`, `tc` and `sysctl` through `nsenter`; [`missing`] says beforehand what of that does not work here.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The result of setting something up; the text says what did not work.
pub type Made<T> = Result<T, String>;

/// Windows that fill a gigabit at 50 ms: 6 MB must be under way, more than what Linux allows by itself.
const WINDOWS: &str = "4096 1048576 67108864";

/// Runs a command and returns what it printed; an error has its last output.
fn run(program: &str, arguments: &[&str], input: &str) -> Made<String> {
    let what = format!("{program} {}", arguments.join(" "));
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{what}: {e}"))?;
    let mut stdin = child.stdin.take().expect("stdin is piped");
    stdin
        .write_all(input.as_bytes())
        .map_err(|e| format!("{what}: {e}"))?;
    drop(stdin);
    let out = child.wait_with_output().map_err(|e| format!("{what}: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    Err(format!("{what}: {} ({})", said.trim(), out.status))
}

/// A host's line to an exchange, the same in both directions.
#[derive(Debug, Clone, Copy)]
pub struct Line {
    /// Bit/s.
    pub rate: f64,
    /// From the host to the exchange.
    pub delay: Duration,
    /// One packet of so many is lost, none with 0.
    pub loss: u32,
}

/// A network namespace.
pub struct Host {
    sleeper: Child,
}

impl Host {
    /// A new one, with its loopback interface up.
    pub fn new() -> Made<Self> {
        let sleeper = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--net", "sleep", "3600"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("setpriv: {e}"))?;
        let host = Self { sleeper };
        // It is there once the process has another namespace than we have.
        let own = std::fs::read_link("/proc/self/ns/net").map_err(|e| format!("/proc/self/ns/net: {e}"))?;
        let deadline = Instant::now() + Duration::from_secs(10);
        while std::fs::read_link(host.file()).is_ok_and(|ns| ns == own) {
            if Instant::now() >= deadline {
                return Err("unshare --net made no namespace within 10 s".to_string());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        host.ip("link set lo up")?;
        Ok(host)
    }

    /// The process that holds it.
    pub fn pid(&self) -> u32 {
        self.sleeper.id()
    }

    fn file(&self) -> String {
        format!("/proc/{}/ns/net", self.pid())
    }

    /// Runs `ip` commands in it, one a line.
    fn ip(&self, commands: &str) -> Made<()> {
        self.run("ip", &["-batch", "-"], commands).map(drop)
    }

    fn run(&self, program: &str, arguments: &[&str], input: &str) -> Made<String> {
        let enter = format!("--net={}", self.file());
        let mut all = vec![enter.as_str(), program];
        all.extend(arguments);
        run("nsenter", &all, input)
    }

    /// A command that runs `program` in it and dies with the calling thread.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("setpriv");
        command
            .args([
                "--pdeathsig",
                "KILL",
                "nsenter",
                &format!("--net={}", self.file()),
                program,
            ])
            // Its "hosts" reach each other over a network that is the test's own.
            .env("OXCCL_INSECURE", "1")
            .stdin(Stdio::null());
        command
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.sleeper.kill();
        let _ = self.sleeper.wait();
    }
}

/// Several hosts that reach each other at [`address`](Self::address).
pub struct Network {
    hosts: Vec<Host>,
    subnet: &'static str,
    // Held for its end: the switch, or the program that is the line.
    _switch: Option<Host>,
    line: Option<Child>,
}

impl Network {
    /// `count` hosts at a switch, each sending at most `rate` (tc's words, such as `1gbit`).
    pub fn switch(count: usize, rate: &str) -> Made<Self> {
        let switch = Host::new()?;
        let mut commands = "link add br0 type bridge\nlink set br0 up\n".to_string();
        let mut hosts = Vec::new();
        for i in 1..=count {
            let host = Host::new()?;
            let pid = host.pid();
            commands += &format!("link add port{i} type veth peer name eth0 netns {pid}\n");
            commands += &format!("link set port{i} master br0\nlink set port{i} up\n");
            hosts.push(host);
        }
        switch.ip(&commands)?;
        for (i, host) in hosts.iter().enumerate() {
            host.ip(&format!(
                "addr add 10.77.0.{}/24 dev eth0\nlink set eth0 up\n",
                i + 1
            ))?;
            let limit = format!("qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 20ms");
            let words: Vec<&str> = limit.split(' ').collect();
            host.run("tc", &words, "")?;
        }
        Ok(Self {
            hosts,
            subnet: "10.77.0",
            _switch: Some(switch),
            line: None,
        })
    }

    /// Two hosts at the ends of a line of `rate` bit/s, `delay` away from each other; `program` is the `wan_link` binary. With
    /// `windows` a connection may have as much under way as such a line holds, without it what Linux allows by itself.
    pub fn line(program: &Path, delay: Duration, rate: f64, windows: bool) -> Made<Self> {
        let hosts = vec![Host::new()?, Host::new()?];
        let pids = hosts.iter().map(|h| h.pid().to_string());
        let how = [(delay.as_secs_f64() * 1e3).to_string(), (rate / 1e6).to_string()];
        let arguments = pids.chain(how).collect();
        let network = Self::with_lines(program, hosts, "10.78.0", arguments, windows)?;
        for (i, host) in network.hosts.iter().enumerate() {
            let (own, other) = (network.address(i), network.address(1 - i));
            host.ip(&format!(
                "addr add {own} peer {other} dev wan0\nlink set wan0 up\n"
            ))?;
        }
        Ok(network)
    }

    /// A host for each of `lines`, which meet at one exchange; `program` is the `wan_link` binary.
    pub fn star(program: &Path, lines: &[Line]) -> Made<Self> {
        let hosts: Vec<Host> = lines.iter().map(|_| Host::new()).collect::<Made<_>>()?;
        let lossy = lines.iter().any(|line| line.loss > 0);
        let mut arguments = vec![if lossy { "star-mtu" } else { "star" }.to_string()];
        arguments.extend(hosts.iter().zip(lines).map(|(host, line)| {
            let (rate, delay) = (line.rate / 1e6, line.delay.as_secs_f64() * 1e3);
            format!("{}:{rate}:{delay}:{}", host.pid(), line.loss)
        }));
        let network = Self::with_lines(program, hosts, "10.79.0", arguments, true)?;
        for (i, host) in network.hosts.iter().enumerate() {
            let own = network.address(i);
            host.ip(&format!("addr add {own}/24 dev wan0\nlink set wan0 up\n"))?;
        }
        Ok(network)
    }

    /// Hosts that `program` joins, once it has said so. With `windows` a connection may have much under way.
    fn with_lines(
        program: &Path,
        hosts: Vec<Host>,
        subnet: &'static str,
        arguments: Vec<String>,
        windows: bool,
    ) -> Made<Self> {
        let mut line = Command::new(program)
            .args(arguments)
            // It ends when this pipe does, that is with us.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        let mut said = String::new();
        let stdout = line.stdout.take().expect("stdout is piped");
        let _ = BufReader::new(stdout).read_line(&mut said);
        let network = Self {
            hosts,
            subnet,
            _switch: None,
            line: Some(line),
        };
        if said.trim() != "up" {
            return Err(format!("the line does not come up: {}", said.trim()));
        }
        for setting in ["tcp_rmem", "tcp_wmem"].iter().filter(|_| windows) {
            network.set(setting, WINDOWS)?;
        }
        Ok(network)
    }

    /// Sets `net.ipv4.<setting>` on every host, for connections from now on.
    pub fn set(&self, setting: &str, value: &str) -> Made<()> {
        let text = format!("net.ipv4.{setting}={value}");
        for host in &self.hosts {
            host.run("sysctl", &["-w", &text], "")?;
        }
        Ok(())
    }

    /// The hosts, in order.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The address of a host.
    pub fn address(&self, host: usize) -> String {
        format!("{}.{}", self.subnet, host + 1)
    }

    /// Runs `program` on every host as `program RANK WORLD FIRST_ADDRESS OWN_ADDRESS arguments…` and returns what each printed.
    /// A process that still runs at `deadline`, or when another has failed, is killed.
    pub fn run(&self, program: &str, arguments: &[String], deadline: Instant) -> Made<Vec<String>> {
        let world = self.hosts.len();
        let mut ranks = Vec::new();
        for (rank, host) in self.hosts.iter().enumerate() {
            let child = host
                .command(program)
                .args([
                    rank.to_string(),
                    world.to_string(),
                    self.address(0),
                    self.address(rank),
                ])
                .args(arguments)
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|e| format!("rank {rank}: {e}"))?;
            ranks.push(Running(child));
        }
        loop {
            let mut left = 0;
            for (rank, running) in ranks.iter_mut().enumerate() {
                match running.0.try_wait() {
                    Ok(Some(status)) if status.success() => {}
                    Ok(Some(status)) => return Err(format!("rank {rank} failed: {status}")),
                    Ok(None) => left += 1,
                    Err(e) => return Err(format!("rank {rank}: {e}")),
                }
            }
            if left == 0 {
                break;
            }
            if Instant::now() >= deadline {
                return Err(format!("{left} of {world} ranks did not end in time"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        // Each printed a few lines, which the pipe has held.
        let mut texts = Vec::new();
        for running in &mut ranks {
            let stdout = running.0.stdout.take().expect("stdout is piped");
            texts.push(std::io::read_to_string(stdout).map_err(|e| e.to_string())?);
        }
        Ok(texts)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(line) = &mut self.line {
            let _ = line.kill();
            let _ = line.wait();
        }
    }
}

/// A rank; killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What is missing here for [`Network::switch`], tried out; `None` if it works.
pub fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("network namespaces need root".to_string());
    }
    Network::switch(2, "1gbit").err()
}

/// What is missing here for [`Network::line`] besides that; `None` if it should work.
pub fn missing_for_a_line() -> Option<String> {
    let tun = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun");
    missing().or_else(|| tun.err().map(|e| format!("/dev/net/tun: {e}")))
}
