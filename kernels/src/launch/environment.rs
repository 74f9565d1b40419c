//! The rank of a process and the address of rank 0, from the environment that launchers set.

use super::error::LaunchError;
use super::handshake::JobKey;

/// The number of ports after `MASTER_PORT` that rank 0 tries.
const PORTS: u16 = 8;

/// The variables of each launcher: rank, number of ranks, and the name of the job. The first launcher with a variable
/// that is set has started this process.
const LAUNCHERS: [(&str, &str, &[&str]); 4] = [
    ("RANK", "WORLD_SIZE", &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", &["PMIX_NAMESPACE"]),
    ("PMI_RANK", "PMI_SIZE", &[]),
    ("SLURM_PROCID", "SLURM_NTASKS", &["SLURM_JOB_ID", "SLURM_STEP_ID"]),
];

/// The variables with the number of a process among those of its machine.
const LOCAL_RANKS: [&str; 4] =
    ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];

/// The variable with the secret of a job.
pub(super) const SECRET: &str = "ITHACA_JOB_SECRET";

/// The fewest bytes of a secret.
const SECRET_BYTES: usize = 16;

/// Whether the id of a run is one that nobody guesses, as `torchrun --standalone` makes it.
fn is_uuid(id: &str) -> bool {
    let parts: Vec<usize> = id.split('-').map(str::len).collect();
    parts == [8, 4, 4, 4, 12] && id.bytes().all(|c| c == b'-' || c.is_ascii_hexdigit())
}

/// The variables of a launcher, for one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchEnv {
    /// Its rank.
    pub rank: u64,
    /// The number of processes.
    pub world: u64,
    /// The host of rank 0: `MASTER_ADDR`.
    pub host: String,
    /// The ports of rank 0, which listens on the first that is free: `ITHACA_PORT`, or the eight after `MASTER_PORT`;
    /// the launcher itself uses `MASTER_PORT`.
    pub ports: Vec<u16>,
    /// The key by which processes of one job recognise each other.
    pub key: JobKey,
    /// Its number among the processes of its machine, where the launcher says it.
    pub local_rank: Option<u64>,
}

impl LaunchEnv {
    /// Reads the environment by `variable`: `RANK` and `WORLD_SIZE`, or the variables of `mpirun` and `srun` for them;
    /// `MASTER_ADDR`; `MASTER_PORT` or `ITHACA_PORT`; and `ITHACA_JOB_SECRET`.
    ///
    /// # Errors
    /// [`LaunchError::Environment`] with every variable that is missing or malformed.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<LaunchEnv, LaunchError> {
        let mut wrong = Vec::new();
        let is_set = |name: &str| variable(name).is_some();
        let launcher = LAUNCHERS.iter().find(|(rank, size, _)| is_set(rank) || is_set(size));
        let (rank_name, size_name, job_names) = *launcher.unwrap_or(&LAUNCHERS[0]);
        let mut number = |name: &str, min: u64, max: u64| {
            let text = variable(name);
            wrong.push(match text.as_deref().map(|text| text.trim().parse::<u64>()) {
                None => format!("{name} is not set"),
                Some(Ok(n)) if (min..=max).contains(&n) => return Some(n),
                Some(Ok(n)) => format!("{name} is {n}, outside {min} to {max}"),
                Some(Err(_)) => {
                    format!("{name} is `{}`, which is not a number", text.unwrap_or_default())
                }
            });
            None
        };
        let rank = number(rank_name, 0, u64::MAX);
        let world = number(size_name, 1, u64::MAX);
        let port = if is_set("ITHACA_PORT") {
            number("ITHACA_PORT", 1, u64::from(u16::MAX))
        } else {
            number("MASTER_PORT", 1, u64::from(u16::MAX) - 1)
        };
        if let Some(secret) = variable(SECRET)
            && secret.len() < SECRET_BYTES
        {
            wrong.push(format!("{SECRET} has {} bytes and needs at least {SECRET_BYTES}", secret.len()));
        }
        let host = variable("MASTER_ADDR").filter(|host| !host.trim().is_empty());
        if host.is_none() {
            wrong.push("MASTER_ADDR is not set".to_owned());
        }
        if let (Some(rank), Some(world)) = (rank, world)
            && rank >= world
        {
            wrong.push(format!("{rank_name} is {rank}, but {size_name} is {world}: ranks start at 0"));
        }
        let (Some(rank), Some(world), Some(port), Some(host), true) =
            (rank, world, port, host, wrong.is_empty())
        else {
            return Err(LaunchError::Environment(wrong));
        };
        // Both bounds were checked above.
        let port = u16::try_from(port).unwrap_or(u16::MAX);
        let ports = if is_set("ITHACA_PORT") {
            vec![port]
        } else {
            (1..=PORTS).filter_map(|n| port.checked_add(n)).collect()
        };
        let host = host.trim().to_owned();
        let mut names: Vec<String> = job_names.iter().filter_map(|name| variable(name)).collect();
        names.extend([env!("CARGO_PKG_VERSION").to_owned(), port.to_string()]);
        let secret = variable(SECRET).or_else(|| variable("TORCHELASTIC_RUN_ID").filter(|id| is_uuid(id)));
        let key = JobKey::of(secret.as_deref(), &names);
        let local_rank = LOCAL_RANKS.iter().find_map(|name| variable(name)?.trim().parse().ok());
        Ok(LaunchEnv { rank, world, host, ports, key, local_rank })
    }

    /// The address of rank 0, for messages.
    pub(super) fn address(&self) -> String {
        match self.ports.as_slice() {
            [first, .., last] => format!("{}:{first} to {last}", self.host),
            [port] => format!("{}:{port}", self.host),
            [] => self.host.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<LaunchEnv, Vec<String>> {
        let env = LaunchEnv::of(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        env.map_err(|error| match error {
            LaunchError::Environment(wrong) => wrong,
            other => vec![other.to_string()],
        })
    }

    #[test]
    fn each_launcher_says_which_process_it_is() {
        let address = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        for (rank, size) in [
            ("RANK", "WORLD_SIZE"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("PMI_RANK", "PMI_SIZE"),
            ("SLURM_PROCID", "SLURM_NTASKS"),
        ] {
            let env = of(&[&address[..], &[(rank, "3"), (size, "4")]].concat()).unwrap();
            assert_eq!((env.rank, env.world, env.host.as_str()), (3, 4, "node0"));
            assert_eq!(env.ports, (29501..=29508).collect::<Vec<u16>>());
        }
        // torchrun in an allocation of Slurm.
        let both =
            [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("RANK", "1"), ("WORLD_SIZE", "2"), address[0]];
        let env = of(&[&both[..], &[("ITHACA_PORT", "7000")]].concat()).unwrap();
        assert_eq!((env.rank, env.world, env.ports), (1, 2, vec![7000]));
    }

    #[test]
    fn every_wrong_variable_is_named() {
        let wrong = of(&[]).unwrap_err();
        let missing = ["RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"];
        assert_eq!(wrong, missing.map(|name| format!("{name} is not set")));
        let wrong =
            of(&[("RANK", "two"), ("WORLD_SIZE", "0"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "65535")])
                .unwrap_err();
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        let wrong = of(&[("RANK", "4"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")])
            .unwrap_err();
        assert_eq!(wrong, ["RANK is 4, but WORLD_SIZE is 4: ranks start at 0"]);
    }

    #[test]
    fn jobs_are_distinguished() {
        let job = |id: &str, port: &str| {
            let variables = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", port)];
            of(&[&variables[..], &[("TORCHELASTIC_RUN_ID", id)]].concat()).unwrap().key
        };
        assert_eq!(job("x", "1"), job("x", "1"));
        assert_ne!(job("x", "1"), job("y", "1"));
        assert_ne!(job("x", "1"), job("x", "2"));
        let uuid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        assert!(job(uuid, "1").is_secret() && !job("my-job", "1").is_secret());
    }

    #[test]
    fn secrets_are_of_some_length() {
        let variables = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        let with = |secret: &str| of(&[&variables[..], &[(SECRET, secret)]].concat());
        assert_eq!(with("short").unwrap_err(), ["ITHACA_JOB_SECRET has 5 bytes and needs at least 16"]);
        let [a, b] = ["a", "b"].map(|letter| with(&letter.repeat(16)).unwrap().key);
        assert!(a.is_secret() && a != b);
    }
}
