//! Addresses as text, `host:port`: taken apart and put together here only, so that an IPv6 literal (`[::1]:29510`) is right everywhere.

use crate::{Error, Result};

/// Host and port of `host:port` or `[v6]:port`; the host comes without brackets. Port 0 is a port.
///
/// Errors: `InvalidArgument` that shows the text and the two forms.
pub fn split_address(address: &str) -> Result<(&str, u16)> {
    let malformed = |why: &str| {
        Error::invalid(format!(
            "'{address}' is not of the form host:port or [IPv6]:port: {why}"
        ))
    };
    let (host, port) = address
        .rsplit_once(':')
        .ok_or_else(|| malformed("it has no ':'"))?;
    // `parse` would take a sign.
    let port = Some(port)
        .filter(|port| port.bytes().all(|b| b.is_ascii_digit()))
        .and_then(|port| port.parse().ok())
        .ok_or_else(|| malformed("what follows the last ':' is not a port from 0 to 65535"))?;
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    match bare {
        None if host.contains([':', '[', ']']) => Err(malformed("an IPv6 address needs brackets")),
        Some(bare) if bare.contains(['[', ']']) => Err(malformed("brackets within brackets")),
        _ => match bare.unwrap_or(host) {
            "" => Err(malformed("the host is missing")),
            host => Ok((host, port)),
        },
    }
}

/// `host:port`; a host with colons gets its brackets, with or without which it may be given.
pub fn join_address(host: &str, port: u16) -> String {
    format!("{}:{port}", bracketed_host(host))
}

/// `host` as it stands in an address or URL: an IPv6 literal in brackets.
pub fn bracketed_host(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]")
    } else {
        host.to_owned()
    }
}

/// Host and port of `http://host:port` or `https://host:port`, with or without a path behind.
///
/// Errors: `InvalidArgument` that shows the URL.
pub fn split_url(url: &str) -> Result<(&str, u16)> {
    let rest = url
        .strip_prefix("http://")
        .or_else(|| url.strip_prefix("https://"))
        .ok_or_else(|| Error::invalid(format!("'{url}' begins neither with http:// nor with https://")))?;
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    split_address(rest.get(..end).unwrap_or_default()).map_err(|e| {
        Error::invalid(format!(
            "'{url}' is not of the form http://host:port: {}",
            e.message()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_names_and_v6_literals_are_split_and_joined_again() {
        for (text, host, port) in [
            ("127.0.0.1:0", "127.0.0.1", 0),
            ("node-7.cluster:29510", "node-7.cluster", 29510),
            ("[::1]:65535", "::1", 65535),
            ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
            ("[::]:0", "::", 0),
        ] {
            assert_eq!(split_address(text).unwrap(), (host, port), "{text}");
            assert_eq!(join_address(host, port), text);
            assert_eq!(split_url(&format!("http://{text}/a:b")).unwrap(), (host, port));
            assert_eq!(split_url(&format!("http://{text}")).unwrap(), (host, port));
            assert_eq!(split_url(&format!("https://{text}/a:b")).unwrap(), (host, port));
        }
        assert_eq!(join_address("[::1]", 5), "[::1]:5");
    }

    #[test]
    fn anything_else_is_refused_with_the_text_and_the_forms() {
        for bad in [
            "",
            "host",
            ":1",
            "[]:1",
            "::1:5",
            "::1",
            "[::1]",
            "[::1]5",
            "host:",
            "host:65536",
            "host:+5",
            "host:-1",
            "host:5 ",
            "[[::1]]:5",
            "a:b:5",
            "[a:5",
            "a]:5",
        ] {
            let e = split_address(bad).unwrap_err();
            assert_eq!(e.kind(), crate::ErrorKind::InvalidArgument);
            assert!(
                e.message().contains(&format!("'{bad}'")) && e.message().contains("host:port"),
                "{e}"
            );
        }
        for bad in ["127.0.0.1:5", "ftp://a:5", "https://a", "http://a", "http:///x:5"] {
            assert!(split_url(bad).unwrap_err().message().contains(bad));
        }
    }
}
