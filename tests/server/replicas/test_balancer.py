"""Requests go to the replica that was sent their prefix, unless it is much busier than others."""

from collections import Counter
from random import Random

from onchip.server.replicas.balancer import PrefixBalancer, PrefixTable
from onchip.server.replicas.prompts import prompt_keys

REPLICAS = ["a", "b", "c"]


def keys_of(text):
    return prompt_keys({"prompt": text})


def ids(*numbers):
    return [bytes([number]) for number in numbers]


class TestTable:
    def test_the_longest_common_prefix_counts(self):
        table = PrefixTable()
        table.record(ids(1, 2, 3), "a")
        table.record(ids(1, 9), "b")
        assert table.match(ids(1, 2, 7), REPLICAS) == {"a": 2, "b": 1, "c": 0}
        assert table.match([], REPLICAS) == {"a": 0, "b": 0, "c": 0}

    def test_memory_is_bounded_and_the_end_of_old_prompts_goes_first(self):
        table = PrefixTable(max_entries=4)
        table.record(ids(1, 2, 3), "a")
        table.record(ids(4, 5), "b")
        assert len(table) == 4
        assert table.match(ids(1, 2, 3), "a") == {"a": 2}
        assert table.match(ids(4, 5), "b") == {"b": 2}
        table.record(ids(*range(10, 20)), "c")  # longer than the table
        assert len(table) == 4 and table.match(ids(*range(10, 20)), "c") == {"c": 4}

    def test_use_keeps_a_prefix(self):
        table = PrefixTable(max_entries=4)
        table.record(ids(1, 2), "a")
        table.record(ids(3, 4), "a")
        table.record(ids(1, 2), "a")
        table.record(ids(5, 6), "a")
        assert table.match(ids(1, 2), "a") == {"a": 2} and table.match(ids(3, 4), "a") == {"a": 0}

    def test_counts_follow_random_lives(self):
        random, table = Random(0), PrefixTable(max_entries=50)
        for _ in range(2000):
            replica = random.choice(REPLICAS)
            if random.random() < 0.02:
                table.forget(replica)
            first = random.randrange(20)
            table.record(ids(*range(first, first + random.randrange(6))), replica)
            assert len(table) == sum(map(table.count, REPLICAS)) <= 50
        held = Counter(replica for _, replica in table._entries)
        assert all(table.count(replica) == held[replica] for replica in REPLICAS)


class TestBalancer:
    def test_requests_with_a_common_prefix_go_to_one_replica(self):
        balancer, system = PrefixBalancer(), "You are a helpful assistant. " * 20
        chosen = {balancer.choose(keys_of(f"{system}{i}"), REPLICAS)[0] for i in range(20)}
        assert len(chosen) == 1

    def test_new_prefixes_spread(self):
        balancer = PrefixBalancer()
        prompts = [f"{i} " * 200 for i in range(30)]
        assert Counter(balancer.choose(keys_of(p), REPLICAS)[0] for p in prompts) == {
            replica: 10 for replica in REPLICAS
        }

    def test_without_a_table_load_alone_decides(self):
        balancer, keys = PrefixBalancer(max_entries=0), keys_of("shared " * 100)
        first = balancer.choose(keys, REPLICAS)[0]
        balancer.count_sent(first)
        assert balancer.choose(keys, REPLICAS)[0] != first and not len(balancer.table)

    def test_load_breaks_ties(self):
        balancer = PrefixBalancer()
        balancer.count_sent("a")
        assert balancer.rank([], REPLICAS)[-1] == "a"
        balancer.count_completed("a")
        balancer.count_sent("b")
        assert balancer.rank([], REPLICAS) == ["a", "c", "b"]

    def test_a_busy_replica_gives_its_prefix_away(self):
        balancer, keys = PrefixBalancer(slack=2), keys_of("shared " * 100)
        for _ in range(30):
            balancer.count_sent(balancer.choose(keys, REPLICAS)[0])
        loads = [balancer._open[replica] for replica in REPLICAS]
        assert sum(loads) == 30 and max(loads) - min(loads) <= 3

    def test_all_replicas_are_ranked_so_that_one_that_rejects_is_followed_by_another(self):
        assert sorted(PrefixBalancer().rank(keys_of("x" * 100), REPLICAS)) == REPLICAS
        assert PrefixBalancer().choose([], []) == []

    def test_a_replica_that_is_gone_is_forgotten(self):
        balancer, keys = PrefixBalancer(), keys_of("shared " * 100)
        balancer.update(REPLICAS)
        first = balancer.choose(keys, REPLICAS)[0]
        balancer.count_sent(first)
        balancer.update(replica for replica in REPLICAS if replica != first)
        assert balancer.table.count(first) == 0 and not len(balancer.table)
        balancer.update(REPLICAS)
        assert balancer._open[first] == 0
        balancer.count_completed(first)  # of a request that died with it
        assert balancer._open[first] == 0

    def test_more_tokens_are_cached_than_by_round_robin(self):
        """60 conversations of 6 turns in random order, with room for every prefix."""
        random, balancer = Random(1), PrefixBalancer()
        turns = [talk for talk in range(60) for _ in range(6)]
        random.shuffle(turns)
        texts = {talk: f"conversation {talk}: " * 8 for talk in range(60)}
        hits, tables = Counter(), {"balancer": PrefixTable(), "round robin": PrefixTable()}
        for number, talk in enumerate(turns):
            texts[talk] += f"turn {number} " * 20
            keys = keys_of(texts[talk])
            for name, replica in (
                ("balancer", balancer.choose(keys, REPLICAS)[0]),
                ("round robin", REPLICAS[number % 3]),
            ):
                hits[name] += tables[name].match(keys, [replica])[replica]
                tables[name].record(keys, replica)
        assert hits["balancer"] >= 1.5 * hits["round robin"]
