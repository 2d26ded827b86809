# they run in fla's tree
collect_ignore = ['written']
