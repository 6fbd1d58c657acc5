"""The metadata group on this broker: Raft with a store, the tasks of its leader, the admission of brokers, the last
resort.
"""
